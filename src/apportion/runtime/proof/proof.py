"""The findings of a proof: its rounds, the difference that each shows, what a survey of the workload has found, the
verdict, and all of it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Surveyed:
    """What a look at a workload has found."""

    rare: tuple[int, ...] = ()
    """The rows that few others are like, the rarest first."""
    read: int = 0
    """The number of rows whose targets were read."""
    of: int = 0
    """The number of rows of the data; 0: they were not looked at."""
    terms: str = ""
    """What the loss terms are, in words."""
    problem: str | None = None
    """What is wrong with the loss, or with a batch, where a batch is divided."""
    left: str | None = None
    """Why the loss could not be tried by itself."""

    @property
    def scope(self) -> str:
        """What of the rows and of the loss the look has covered, as the end of a sentence."""
        said = []
        if self.of and self.read == self.of:
            said.append(f"rare rows were looked for among the targets of all {self.of:,}")
        elif self.of:
            share = 100 * self.read / self.of
            said.append(f"rare rows were looked for among the targets of {share:.2g} % of {self.of:,}")
        else:
            said.append("rare rows were not looked for")
        if self.terms.startswith("derived"):
            said.append(f"loss terms {self.terms}")
        if self.left is not None:
            said.append(f"the loss was not tried by itself: {self.left}")
        return "".join(f"; {text}" for text in said)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value from its fields as plain data."""
        return cls(**{**stored, "rare": tuple(stored["rare"])})


Verdict = Literal["equal", "different", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The tensor that differs most, at the step where it does."""

    name: str
    """The name of the tensor: ``model/...``, ``optimizer/...`` or ``carry/...``."""
    step: int
    """The step at which it differs; the first is 1."""
    absolute: float
    relative: float
    """The difference as a share of the change since the start; the bound is for this one."""
    own: bool = False
    """True where that is the tensor's own change; False where it is the largest of all weights, of all slots of its
    kind, or of this buffer."""
    factor: float | None = None
    """The factor between what the tensor has changed by and what it should have; None where the one is not a multiple
    of the other."""
    ratio: float | None = None
    """How many times as long as it should be the tensor's change is, in the 2-norm; None where nothing is to change."""
    cosine: float | None = None
    """The cosine of the angle between the tensor's change and what it should be."""

    @property
    def scale(self) -> str:
        """What the difference is a share of, in words."""
        return "its own change" if self.own else "the largest change"

    @property
    def direction(self) -> str:
        """Ratio and cosine in words; empty where nothing was to change."""
        if self.ratio is None or self.cosine is None:
            return ""
        return f"; its change is {self.ratio:.7g} times as long as one device's, with a cosine of {self.cosine:.7g}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """The proof in one precision."""

    precision: str
    steps: int
    tensors: int
    worst: Difference
    noise: float
    """The relative difference between two runs of the reference, one of them with every weight and gradient moved by a
    rounding; infinite where the reference comes to be NaN, or where nothing has moved."""
    bound: float
    disagreement: str | None
    """A rank whose state differs from rank 0's, and when."""
    verdict: Verdict
    """The verdict of the round. ``undecided``: above what may be called equal, within 100 times the noise; or too
    little has moved."""
    own: int = 0
    """The number of tensors that were held against their own change; the others against the largest of their kind."""
    share: float = 0.0
    """The largest difference of all tensors as a share of the largest change of its kind."""
    coarsest: str | None = None
    """A type that rounds more coarsely than the precision, in which the model computes in places; the round is held
    against its rounding where that of the precision leaves the answer open."""

    @property
    def holds(self) -> bool:
        return self.verdict == "equal"

    @property
    def scales(self) -> str:
        """How many tensors were held against which change, in words; empty where all were against their own."""
        others = self.tensors - self.own
        if not self.own or not others:
            return ""
        return f" ({self.own} tensors against their own change, {others} against the largest)"

    @property
    def arithmetic(self) -> str:
        """The types that the round is computed in."""
        return self.precision if self.coarsest is None else f"{self.precision} with {self.coarsest} in places"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The findings of ``check``."""

    strategy: str
    """The strategy that was proved, as it is typed."""
    workers: int
    """The number of workers that it ran on."""
    exact: bool
    """True where the reference is the one-device step, False where it is the strategy's own (an approximate one)."""
    rounds: tuple[Round, ...]
    """The findings in each precision, float64 first."""
    by_design: tuple[str, ...]
    """The things that differ by design, or could not be checked, in words."""
    hosts: int = 1
    """The number of hosts that the workers ran on."""
    gradients: Round | None = None
    """The round where every optimizer is plain SGD of rate 1, so that the change is the gradient: an optimizer that
    divides by its size (Adam) hides a factor. None: the state shows it already, or the strategy is approximate."""
    many: Round | None = None
    """One step in float64 on as many rows as the run has in a batch, or the most that fitted the time."""
    rows: int = 0
    """The largest number of rows that a rank had in a step; 0: it is not known."""
    cuts: tuple[str, ...] = ()
    """The parts that were left out for want of time, as clauses."""
    first: str | None = None
    """The first module whose output or gradient differs in the step that does, in words."""
    causes: tuple[str, ...] = ()
    """The likely origins of a difference, in whole sentences."""
    unrepeatable: str | None = None
    """What of one device's state is another when its step is repeated, in words."""
    uncompared: tuple[str, ...] = ()
    """What a step owes besides its states and was not compared: what it reports and predicts, and the step after a
    state that is loaded."""
    survey: Surveyed | None = None
    """The rare rows of the data, and what the loss has shown by itself; None: they were not looked for."""
    rare: Proof | None = None
    """The proof on rows that have the rare ones among them, where it was made beside the others."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of all rounds, and of the loss by itself: the first round and the gradients have to show it; the
        run's own precision may leave it open."""
        if self._problem is not None or (self.rare is not None and self.rare.verdict == "different"):
            return "different"
        shown = self.rounds if self.gradients is None else (*self.rounds, self.gradients)
        if any(r.verdict == "different" for r in (*shown, *filter(None, [self.many]))):
            return "different"
        first = self.rounds[0].holds and (self.gradients is None or self.gradients.holds)
        return "equal" if first else "undecided"

    @property
    def holds(self) -> bool:
        """True where it is shown to be the same network."""
        return self.verdict == "equal"

    @property
    def sentence(self) -> str:
        """The verdict as one sentence."""
        whose = "one device" if self.exact else "its own reference (it is approximate by design)"
        what = f"{self.strategy} on {self.workers} worker{'s' if self.workers != 1 else ''}"
        what += f" of {self.hosts} hosts" if self.hosts > 1 else ""
        if self.verdict == "equal":
            left = [r.arithmetic for r in self.rounds[1:] if not r.holds]
            own = f"; in {left[0]} rounding alone is too large to show it as well" if left else ""
            shown = f"in its first steps, shown in {self.rounds[0].arithmetic}{self.rounds[0].scales}{own}"
            return f"{what} trains the same network as {whose} {shown}{self._scope}"
        if self.verdict == "undecided":
            why = self.unrepeatable or "rounding hides the answer, or too little moves"
            return f"it is not shown that {what} trains the same network as {whose} in its first steps: {why}"
        if self._problem is not None:
            return f"{what} does not train the same network as {whose}: {self._problem}"
        first = "" if self.first is None else f"; {self.first}"
        likely = first + "".join(f"; likely, {cause}" for cause in self.causes)
        return f"{what} does not train the same network as {whose}: {self.evidence}{likely}"

    def __str__(self) -> str:
        """The findings in words, as the terminal shows them."""
        from apportion.runtime.proof.proof_text import proof_lines

        return "\n".join(proof_lines(self))

    def _repr_html_(self) -> str:
        """The findings as a notebook shows them."""
        from apportion.runtime.proof.proof_text import proof_html

        return proof_html(self)

    @property
    def _problem(self) -> str | None:
        """What is wrong with the loss where a batch is divided."""
        return None if self.survey is None else self.survey.problem

    @property
    def _scope(self) -> str:
        """What the proof covers and what was left out, as the end of a sentence."""
        rows = f", with up to {self.rows} row{'s' if self.rows != 1 else ''} per rank" if self.rows else ""
        surveyed = "" if self.survey is None else self.survey.scope
        if self.rare is not None and self.rare.verdict == "equal":
            surveyed += f"; {self.rare.rounds[0].steps} further steps had the rarest rows among theirs"
        elif self.rare is not None:
            surveyed += "; further steps with the rarest rows among theirs leave it open"
        left = f"; not compared: {', '.join(self.uncompared)}" if self.uncompared else ""
        return rows + surveyed + "".join(f"; {cut}" for cut in self.cuts) + left

    def with_survey(self, survey: Surveyed) -> Self:
        """Returns the proof with what a survey of the workload has found: a loss that is wrong where a batch is divided
        is the cause of whatever else differs."""
        causes = self.causes if survey.problem is None else (survey.problem,)
        return replace(self, survey=survey, causes=causes)

    def with_rare_rows(self, rare: Proof) -> Self:
        """Returns the proof with that on rare rows beside it, which says where a difference comes from that it alone
        shows."""
        return replace(self, rare=rare, first=self.first or rare.first, causes=self.causes or rare.causes)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, from which ``from_json`` makes the same value."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value that ``to_json`` has described."""
        rounds = tuple(_round(found) for found in stored["rounds"])
        gradients, many = (None if stored[name] is None else _round(stored[name]) for name in ("gradients", "many"))
        words = {name: tuple(stored[name]) for name in ("by_design", "causes", "cuts", "uncompared")}
        survey = None if stored["survey"] is None else Surveyed.from_json(stored["survey"])
        rare = None if stored["rare"] is None else cls.from_json(stored["rare"])
        found = {"rounds": rounds, "gradients": gradients, "many": many, "survey": survey, "rare": rare}
        return cls(**{**stored, **words, **found})

    @property
    def evidence(self) -> str:
        """The evidence of a difference: what is wrong with the loss; or what differs, where, and by how much."""
        if self._problem is not None:
            return self._problem
        shown = (*self.rounds, *filter(None, [self.gradients, self.many]))
        found = next((r for r in shown if r.verdict == "different"), self.rounds[0])
        if found.verdict != "different" and self.rare is not None and self.rare.verdict == "different":
            return f"with rare rows of the data in a batch, {self.rare.evidence}"
        if found.disagreement is not None:
            return found.disagreement
        worst = found.worst
        what = "the gradient of " if found is self.gradients else ""
        return (
            f"{what}{worst.name} differs after step {worst.step} by {worst.absolute:.2g}, which is "
            f"{worst.relative:.2g} of {worst.scale}, in {found.precision}{worst.direction}"
        )


def _round(stored: Mapping[str, Any]) -> Round:
    return Round(**{**stored, "worst": Difference(**stored["worst"])})


Answer = Literal["equal", "different", "undecided", "not proved"]


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The knowledge that a run has of its strategy before it trains."""

    verdict: Answer
    sentence: str
    """The answer in words."""
    seconds: float
    """The seconds that finding out took."""
    remembered: bool = False
    """True where the answer is an earlier run's."""
    plain: tuple[str, ...] = ()
    """The fast paths that had to be switched off."""
    uncompared: tuple[str, ...] = ()
    """What a step owes besides its states and was not compared."""

    @property
    def proved(self) -> bool:
        return self.verdict == "equal"
