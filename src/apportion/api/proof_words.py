"""The words of a proof: what a difference is likely to come from, what was left open, and what differs by design."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from apportion.runtime.proof.module_taps import TapDifference
from apportion.runtime.proof.proof import Round


def likely_causes(
    rounds: Sequence[Round], workers: int, drawn: Sequence[str], first: TapDifference | None = None
) -> Iterator[str]:
    """Yields what a difference is likely to come from, as far as the rounds show it. ``drawn``: what draws random
    numbers that each rank has for itself; ``first``: the first module that computes something else."""
    wrong = [r for r in rounds if r.verdict == "different"]
    factors = {round(r.worst.factor, 3) for r in wrong if r.worst.factor is not None}
    if workers > 1 and factors & {float(workers), round(1 / workers, 3)}:
        yield (
            f"what changes is off by the number of workers, {workers}: the loss is a sum where a mean is expected "
            '(reduction="mean"), or count= does not say how many terms it has'
        )
    if wrong and drawn:
        accepted = dict.fromkeys(place.rpartition("(")[2].rstrip(")") for _, _, place in map(_split, drawn))
        yield (
            f"it draws random numbers as it computes ({', '.join(drawn)}), and each rank draws its own: draw them in "
            "augment, keyed by example, which gives the same numbers on any number of workers; or accept it, which "
            "trains another network than one device does, with per_rank_draws="
            f"({', '.join(map(_quoted, accepted))},) in the Workload"
        )
    elif wrong and first is not None and not first.relation.same:
        yield from _of_first(first)


def _of_first(first: TapDifference) -> Iterator[str]:
    name = first.module or "the network"
    if first.what == "output":
        yield (
            f"{name} gives for the same rows what one device does not: it looks at the other rows of the batch "
            "(statistics of a batch, rows that depend on each other), or at its rank"
        )
    elif first.what == "gradient of the output":
        yield (
            "the outputs are one device's and their gradients are not: the loss is not the mean of as many terms as "
            "count= says (labels left out, class weights), it couples the rows, or collate gave other rows than it was "
            "given"
        )


def _split(drawn: str) -> tuple[str, str, str]:
    return drawn.partition(" in ")


def _quoted(name: str) -> str:
    return f'"{name}"'


def open_question(found: Round) -> str:
    """Returns why a round leaves the answer open, and what would close it."""
    if found.noise == float("inf"):
        return f"{found.precision}: one device's own weights are not finite after {found.steps} steps: nothing is shown"
    if found.coarsest is not None:
        return (
            f"{found.precision}: the model computes in {found.coarsest} in places, whose rounding makes up to "
            f"{found.noise:.2g} of its change in {found.steps} steps: too much to tell a small mistake from it"
        )
    return (
        f"{found.precision}: in {found.steps} steps this network makes {found.noise:.2g} of its change by rounding "
        "alone, too much to tell a mistake from it: nothing is shown; use fewer steps, or another learning rate"
    )


def by_design(seen: Mapping[str, list[str]]) -> list[str]:
    """Returns what ranks do otherwise than one device by design, as it was seen in the steps of a proof."""
    named = []
    if seen["dropout"]:
        named.append(f"dropout draws differ between ranks by design: checked without ({', '.join(seen['dropout'])})")
    if seen["row_draws"]:
        named.append(
            f"random numbers for each row ({', '.join(seen['row_draws'])}) are drawn by each rank for its own rows, as "
            "those of dropout are: checked with the same numbers for the same row"
        )
    if seen["accepted_draws"]:
        named.append(
            f"each rank draws random numbers of its own ({', '.join(seen['accepted_draws'])}), which per_rank_draws= "
            "accepts: checked with one number for all"
        )
    if seen["draws"]:
        named.append(
            f"the model draws random numbers as it computes ({', '.join(seen['draws'])}), each rank its own: "
            "this difference is not rounding; draw them in augment, keyed by example, to have them equal"
        )
    return named
