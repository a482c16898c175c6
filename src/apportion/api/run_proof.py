"""The proof of a run on its own workload: what is known of it from an earlier run, or found out before the first step,
within its time.

The proof trains the run's workload for a few steps on a few rows, which are uneven between the ranks; where they do
not feed them, or leave it open, on whole batches. A strategy that differs is tried once more with every fast path
switched off, so that a fast path that is wrong costs speed and not the strategy.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from apportion.api.proof_rows import STEPS, on_few_rows, on_rare_rows
from apportion.api.proof_workers import ProofRequest, WorkloadSurvey
from apportion.api.prover import prove
from apportion.core import fast_paths
from apportion.core.data.sent_rows import SentRows
from apportion.core.strategy import cut_at
from apportion.errors import ApportionError, NotProved
from apportion.planner.trials.trial import Candidate
from apportion.process import give_back
from apportion.runtime.cached_proof.proof_key import ProofKey, what_changed
from apportion.runtime.cached_proof.store import keep_proof, latest_proof, now, proofs_of, remove
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.ranks import LocalRanks, Ranks
from apportion.runtime.proof.limits import BUDGET_SHARE, OutOfMemoryError, OutOfTimeError, budget
from apportion.runtime.proof.proof import Proof, Settled, Surveyed
from apportion.runtime.spawn.imports import Imports
from apportion.runtime.spawn.template import Spare
from apportion.runtime.worker.job import Job

LEAST_SECONDS = 3.0
"""The seconds that a proof is given at least, where choosing the strategy has taken the rest."""
IMPORTING_SHARE = 0.5
"""The share of the time of a proof that its processes wait for one which imports the workload's packages."""
READING_SHARE = 0.2
"""The share of the time of a proof in which the targets of the data are read."""
QUICK_SHARE, MANY_SHARE = 0.35, 0.5
"""A first proof within QUICK_SHARE of the time was quick, and a second may take MANY_SHARE of it."""
MOST_CHANGES = 5
"""The number of things that are named where an earlier proof is not reused."""
MOST_STEPS = 17
"""The number of steps up to which the proof goes on until ranks that average now and then have done so."""


class SelfProof:
    """The proof of one run."""

    def __init__(
        self,
        job: Job,
        chosen: Candidate,
        *,
        step_seconds: float | None = None,
        spent: float = 0.0,
        required: bool = False,
        hosts: Sequence[int] = (),
    ) -> None:
        """Takes the job to prove. ``step_seconds``: what a step of the run takes, where it was measured. ``spent``:
        seconds of the same budget that choosing the strategy took. ``required``: the run must not go on where nothing
        was shown. ``hosts``: the numbers of ranks on each host, where the proof is made on those of the run."""
        self._job, self._chosen, self._step_seconds, self._required = job, chosen, step_seconds, required
        self._spent, self._parameters, self._run_steps = spent, 0, 0
        self._cuts: tuple[str, ...] = ()
        self._lengths: tuple[int, ...] = ()
        self._proved = chosen
        """The candidate with its stages cut as the run's are."""
        self._surveyed = Surveyed()
        self._importer: Spare | None = None
        """The process that those of the proof are forked from."""
        self._known: Settled | None = None
        self._outdated = ""
        """Why the proof that an earlier run has made of this workload is not reused, as the end of a sentence."""
        self._hosts = list(hosts)
        self._ranks: Ranks

    def take_rows(self, sent: SentRows | None) -> None:
        """Has the reference train on these rows, where other hosts have some of the parts of the data."""
        self._job = replace(self._job, sent=sent)

    def known(self, asked: Mapping[str, Any]) -> Settled | None:
        """Returns what was found before, in this run or an earlier one. ``asked`` has the ``key`` that rank 0 has made
        of the workload (a ``ProofKey`` as plain JSON), the ``steps`` of the whole run, its ``parameters``, a
        number, the ``lengths`` of the parts of its data, if it has any, and the ``cuts`` of its stages, as the times of
        its layers have decided them: the proof cuts there too."""
        self._cut(asked["cuts"])
        key = ProofKey.from_json(asked["key"])
        if self._known is None and not self._job.reprove:
            self._known = self._reused(key)
            self._outdated = "" if self._known is not None else self._why_outdated(key)
        return self._known

    @property
    def outdated(self) -> str:
        """Why an earlier proof of this workload is not reused, as the end of a sentence; empty where there is none."""
        return self._outdated

    def _why_outdated(self, key: ProofKey) -> str:
        if not key.code:  # nothing of it is kept, and its sentence says why
            return ""
        earlier = latest_proof(key.code, self._label(), str(self._chosen.strategy), self._chosen.ranks)
        if earlier is None:
            return ""
        if earlier.path.parent.name != key.code:
            changed = what_changed(earlier.code_parts, key.code_parts)
        else:
            how = self._how()
            changed = list(key.changed.get(earlier.name, ()))
            changed = changed or [f"the {name}" for name in how if how[name] != earlier.how.get(name)]
        named, more = changed[:MOST_CHANGES], len(changed) - MOST_CHANGES
        listed = ", ".join(named) + (f" and {more:,} more" if more > 0 else "")
        return f"; the proof of {earlier.made} is not reused, since this has changed: {listed}" if changed else ""

    def _reused(self, key: ProofKey) -> Settled | None:
        """Returns the answer of the newest cached proof that holds for this run; None where there is none."""
        names = {self._name(one.key) for one in key.found}
        for proof in proofs_of(key.code) if names else ():
            if proof.name in names:
                with suppress(TypeError, KeyError):  # the file of another version
                    settled = {**proof.settled, **{n: tuple(proof.settled[n]) for n in ("plain", "uncompared")}}
                    sample = f"; {proof.basis.sentence}" if proof.basis.sentence else ""
                    sentence = f"{settled['sentence']} (a cached proof of {proof.made}, reused{sample})"
                    return Settled(**{**settled, "sentence": sentence, "seconds": 0.0, "remembered": True})
        return None

    def settle(self, asked: Mapping[str, Any], ranks: Ranks | None = None) -> Settled:
        """Makes the proof, and keeps its answer for the next run. ``ranks``: those that make the strategy's steps; None
        starts processes here."""
        self._ranks = ranks or LocalRanks()
        if not self._ranks.side_by_side:  # they run already, and nothing has started other processes before
            with suppress(ApportionError):  # the start of one raises it again
                self._chosen.launcher.prepare()
        began = time.monotonic()
        self._parameters, self._run_steps = int(asked["parameters"]), int(asked["steps"])
        self._lengths = tuple(asked.get("lengths", ()))
        seconds = self.seconds(asked["steps"])
        imports = Imports(tuple(asked.get("imports", ())), asked.get("environment", {}))
        with shared_imports(imports, IMPORTING_SHARE * seconds) as self._importer:
            found = self._found(began, seconds)
        give_back()  # the states that were compared: the run goes on in this process
        self._known = replace(found, seconds=time.monotonic() - began)
        if found.verdict in ("equal", "different"):
            self._known = self._kept(ProofKey.from_json(asked["key"]), self._known)
        self._known = replace(self._known, sentence=self._known.sentence + self._outdated)
        return self._known

    def _kept(self, key: ProofKey, settled: Settled) -> Settled:
        """Keeps an answer for the next run, in the place of those that hold for the same; returns it, with the reason
        where it cannot be reused."""
        why = key.why
        if why is None and key.seconds > settled.seconds:
            why = f"the update on four rows that tells this workload from others took {key.seconds:.2g} s, "
            why += f"longer than the proof ({settled.seconds:.2g} s)"
        if why is None and key.made is not None and (path := key.made.basis.changed_since(key.at)) is not None:
            why = f"{path} was written while the proof was made"
        if why is not None:
            return replace(settled, sentence=f"{settled.sentence}; a later run cannot reuse this proof: {why}")
        outdated = {self._name(one.key) for one in key.found}
        for proof in proofs_of(key.code):
            if proof.name in outdated:
                remove(proof)
        keyed = key.made or key.found[0]
        about = {
            "key": keyed.key,
            "parts": dict(keyed.parts),
            "code_parts": dict(key.code_parts),
            "how": self._how(),
            "workload": self._label(),
            "strategy": str(self._chosen.strategy),
            "workers": self._chosen.ranks,
            "verdict": settled.verdict,
            "made": now(),
        }
        keep_proof(key.code, self._name(keyed.key), about, keyed.basis, asdict(settled))
        return settled

    def _label(self) -> str:
        """Returns the workload as a list of cached proofs names it."""
        if self._job.address is not None:
            return self._job.address
        if isinstance(self._job.workload, str):
            return self._job.workload
        model = self._job.workload.model
        return f"{getattr(model, '__module__', '')}.{getattr(model, '__qualname__', type(model).__name__)}"

    def _cut(self, cuts: Sequence[str] | None) -> None:
        self._cuts = tuple(cuts or ())
        self._proved = replace(self._chosen, strategy=cut_at(self._chosen.strategy, cuts or ()))

    def too_many(self) -> Settled:
        """Returns the answer for ranks that one host cannot imitate."""
        return self.unproved(f"one host cannot start {self._chosen.ranks} processes to show it")

    def compressed(self) -> Settled:
        """Returns the answer where hosts send each other what no reference knows."""
        sentence = (
            f"it is not proved that {self._chosen.strategy} trains the same network as one device: "
            f"what hosts send each other is compressed. Without that, or on one host: {self._command()}"
        )
        return Settled(verdict="not proved", sentence=sentence, seconds=0.0)

    def check(self, settled: Settled) -> dict[str, Any]:
        """Returns what the run writes down of the answer. Raises NotProved where the run must not go on as it is."""
        if settled.plain != self._job.plain or settled.verdict == "different":
            raise NotProved(settled.sentence, proved=settled.proved, plain=settled.plain)
        if self._required and not settled.proved:
            raise NotProved(settled.sentence, proved=settled.proved, plain=settled.plain)
        return asdict(settled)

    def seconds(self, steps: int) -> float:
        """Returns the seconds that a proof may take before a run of ``steps`` steps."""
        return max(LEAST_SECONDS, budget(steps * (self._step_seconds or 0.0)) - self._spent)

    def _found(self, began: float, seconds: float) -> Settled:
        try:
            settled = replace(self._settled(self._proof(began + seconds)), plain=self._job.plain)
            if settled.verdict != "different" or self._job.plain or self._surveyed.problem is not None:
                return settled
            return self._by_plain_paths(began + seconds) or settled
        except OutOfTimeError as error:
            share = max(seconds, time.monotonic() - began)
            return self._without_proof(f"{error}, and {share:.0f} s are its share")
        except OutOfMemoryError as error:
            return self._without_proof(str(error))
        except (ApportionError, ValueError, OSError) as error:
            return self._without_proof(str(error).partition("\n")[0])

    def _by_plain_paths(self, until: float) -> Settled | None:
        """Returns the answer with every fast path switched off, where that trains the same network; else None: what was
        found with them stands."""
        with suppress(OutOfTimeError, OutOfMemoryError, ApportionError, ValueError, OSError):
            plain = self._settled(self._proof(until, fast_paths.ALL))
            return replace(plain, plain=fast_paths.ALL) if plain.proved else None
        return None

    def _without_proof(self, why: str) -> Settled:
        return self.unproved(why) if self._surveyed.problem is None else self._of_loss()

    def _of_loss(self) -> Settled:
        """Returns the answer where the loss by itself has shown what the steps did not come to."""
        strategy = self._chosen.strategy
        return self._settled(
            Proof(
                strategy=str(strategy),
                workers=self._chosen.ranks,
                hosts=max(1, len(self._hosts)),
                exact=strategy.exact,
                rounds=(),
                by_design=(),
            )
        )

    def _settled(self, proof: Proof) -> Settled:
        """Returns the answer of a proof, and of the loss by itself."""
        found = proof.with_survey(self._surveyed)
        return Settled(verdict=found.verdict, sentence=found.sentence, seconds=0.0, uncompared=found.uncompared)

    def _proof(self, until: float, plain: tuple[str, ...] | None = None) -> Proof:
        """Makes the proof while another process looks for rare rows, and at the loss."""
        if plain is not None:
            return self._proof_on_rows(until, self._asked(plain), self._surveyed)
        asked = self._asked(self._job.plain)
        seconds = READING_SHARE * (until - time.monotonic())
        with WorkloadSurvey.begun(asked, seconds=seconds, ranks=self._ranks) as looking:
            return self._proof_on_rows(until, asked, looking)

    def _asked(self, plain: tuple[str, ...]) -> ProofRequest:
        """Returns the request for a proof on whole batches. ``plain``: the fast paths that are switched off."""
        return ProofRequest(
            workload=self._job.workload,
            chosen=self._proved,
            steps=self._steps(),
            changes=self._job.changes,
            brief=True,
            parameters=self._parameters,
            plain=plain,
            run_steps=self._run_steps,
            lengths=self._lengths,
            sent=self._job.sent,
            share=BUDGET_SHARE,
            hosts=max(1, len(self._hosts)),
            cuts=self._cuts,
            importer=self._importer,
        )

    def _proof_on_rows(self, until: float, asked: ProofRequest, looking: WorkloadSurvey | Surveyed) -> Proof:
        """Makes the proof on a few rows, and on more where that was quick; on whole batches where a few say nothing."""
        began, given = time.monotonic(), until - time.monotonic()

        def more(proof: Proof) -> ProofRequest | None:
            """Returns the second pass, where the first was quick and what was looked for meanwhile lets it."""
            quick = proof.verdict == "equal" and time.monotonic() - began < QUICK_SHARE * given
            self._look(looking, READING_SHARE * given)
            if not quick or self._surveyed.problem is not None:
                return None
            return replace(on_rare_rows(asked, self._surveyed), many=True, seconds=MANY_SHARE * given)

        few = replace(on_few_rows(asked), seconds=given, then=more)
        proof = None
        try:
            proof = prove(few, self._ranks)
        except OutOfTimeError:
            return self._on_short_sequences(replace(few, then=None), until)
        except ValueError:  # rows that do not feed the ranks, or what whole batches have to say too
            pass
        finally:
            self._look(looking, READING_SHARE * given)
        if proof is None or (proof.verdict == "undecided" and self._surveyed.problem is None):
            return prove(replace(asked, rows=0, seconds=until - time.monotonic()), self._ranks)
        return proof

    def _look(self, looking: WorkloadSurvey | Surveyed, seconds: float) -> None:
        self._surveyed = looking.found(seconds) if isinstance(looking, WorkloadSurvey) else looking

    def _on_short_sequences(self, asked: ProofRequest, until: float) -> Proof:
        """Makes the proof on the beginnings of the sequences, where there was no time for whole ones. Where there are
        none, where the model takes none, or where they leave the answer open, one step is made whatever the time, and
        as many more as there is time for."""
        with suppress(ApportionError, ValueError, OutOfTimeError):
            proof = prove(replace(asked, short=True, seconds=until - time.monotonic()), self._ranks)
            if proof.verdict != "undecided":
                return proof
        return prove(replace(asked, least=True, seconds=max(0.0, until - time.monotonic())), self._ranks)

    def _steps(self) -> int:
        strategy = self._chosen.strategy
        every = getattr(strategy, "every", None)
        return max(STEPS, every + 1) if isinstance(every, int) and every < MOST_STEPS else STEPS

    def unproved(self, why: str) -> Settled:
        """Returns the answer where nothing can be shown, for this reason."""
        strategy = self._chosen.strategy
        sentence = (
            f"it is not proved that {strategy} on {self._chosen.ranks} workers trains the same network as one device: "
            f"{why}; to prove it: {self._command()}"
        )
        return Settled(verdict="not proved", sentence=sentence, seconds=0.0)

    def _command(self) -> str:
        place = self._job.address or "FILE:NAME"
        command = f"apportion check {place} --strategy {str(self._chosen.strategy)!r}"
        if not self._hosts:
            return f"{command} --workers {self._chosen.ranks}"
        launcher = self._job.launcher
        return f"{command} --launcher {'env, on these ranks' if launcher.startswith('env') else shlex.quote(launcher)}"

    def _name(self, key: str) -> str:
        """Returns the name under which the answer is kept: of the key of what it holds for, and of where and how that
        is trained."""
        about = {"workload": key, **self._how()}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]

    def _how(self) -> dict[str, Any]:
        """Returns where and how the workload is trained, by what a person calls it."""
        launcher = self._chosen.launcher
        return {
            "strategy with its cuts": str(self._proved.strategy),
            "number of ranks": self._chosen.ranks,
            "number of workers": launcher.workers,
            "number of threads": launcher.threads_each(self._chosen.ranks),
            "device": launcher.device,
            "fast paths that are switched off": list(self._job.plain),
            "ranks of each host": self._hosts,
        }


# One process that imports a workload's packages for all the processes of its proof, which are forked from it.


FEWEST = 100
"""The number of modules below which each process imports them by itself: that takes less time than to wait for one."""


@contextmanager
def shared_imports(imports: Imports, seconds: float) -> Iterator[Spare | None]:
    """Starts the process and ends it. None where there is little to import, where that takes more than ``seconds``, or
    where the process is not fit to be forked: it has threads or open files, or packages that may depend on a variable
    which the user's code has changed."""
    if len(imports.modules) < FEWEST:
        yield None
        return
    try:
        spare = Local(workers=1, device="cpu").importer(imports)
    except (ApportionError, OSError):  # the processes of the proof report why
        yield None
        return
    try:
        yield spare if spare.wait_ready(seconds) else None
    finally:
        spare.close()
