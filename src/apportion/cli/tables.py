"""What ``check`` and ``compare`` have found, and which proofs are cached, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from apportion.cli.flags import in_flags

if TYPE_CHECKING:
    from apportion.api.compare import ComparedRow
    from apportion.runtime.proof.proof import Proof, Round


class FrankConsole(Console):
    """A console that leaves a closed pipe to the caller: rich's own answer is to leave with exit status 1."""

    def on_broken_pipe(self) -> None:
        raise


def show_proof(proof: Proof) -> None:
    """Prints what ``check`` found, in words."""
    console = FrankConsole(soft_wrap=True, highlight=False, markup=False)
    whose = "one device" if proof.exact else "its own reference (it is approximate by design)"
    console.print(f"{proof.strategy} on {proof.workers} workers against {whose}:")
    for found in proof.rounds:
        console.print(_round_line(found))
    for line in proof.by_design:
        console.print(f"  by design: {line}")
    if proof.gradients is not None:
        console.print(_round_line(proof.gradients, "gradients in "))
    if proof.rare is not None:
        for found in proof.rare.rounds:
            console.print(_round_line(found, "rare rows in "))
        if proof.rare.gradients is not None:
            console.print(_round_line(proof.rare.gradients, "gradients of rare rows in "))
    if proof.first is not None:
        console.print(f"  {proof.first}")
    for line in proof.causes:
        console.print(f"  likely: {line}")
    verdicts = {
        "equal": "the same network in its first steps",
        "different": "NOT the same network",
        "undecided": "UNDECIDED",
    }
    console.print(in_flags(proof.sentence))
    console.print(verdicts[proof.verdict])


def _round_line(found: Round, what: str = "") -> str:
    worst = found.worst
    verdict = {"equal": "equal", "different": "DIFFERENT", "undecided": "UNDECIDED"}[found.verdict]
    line = (
        f"  {what}{found.precision}: {verdict} over {found.steps} steps and {found.tensors} tensors; worst is "
        f"{worst.name} after step {worst.step}, by {worst.absolute:.2g}, {worst.relative:.2g} of {worst.scale} "
        f"(bound {found.bound:.2g}, rounding noise {found.noise:.2g})"
    )
    return line if found.disagreement is None else f"{line}\n    {found.disagreement}"


def show_proofs(proofs: Sequence[Mapping[str, Any]]) -> None:
    """Prints the cached proofs, one a line."""
    console = FrankConsole(soft_wrap=True, highlight=False, markup=False)
    if not proofs:
        console.print("no proofs are cached")
        return
    for proof in proofs:
        who = f"{proof['strategy']} on {proof['workers']} workers"
        size = f"{proof['bytes'] / 1000:.1f} KB"
        console.print(f"{proof['name'][:8]}  {proof['made']}  {proof['verdict']}  {who}  {proof['workload']}  {size}")
    console.print("remove some: apportion proofs --remove NAME, or --remove all")


def show_rows(rows: Sequence[ComparedRow]) -> None:
    """Prints what ``compare`` measured, as a table that fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=13)
    for name in (
        "workers",
        "step ms",
        "examples/s",
        "speed-up",
        "compute",
        "wait",
        "send",
        "exact",
        "MiB",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(width=120, highlight=False, markup=False)
    console.print(table)
    for line in _LEGEND:
        console.print(line, style="dim")


_LEGEND = (
    "workers: processes x threads; step: the median; ~ predicted before it ran, and",
    "by how much it took longer than that; speed-up: over single_device",
    "compute, wait (for others), send: shares of the time",
    "MiB: weights, slots, buffers of all",
)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size >= 10 << 20 else f"{size / 2**20:.2g}"


def _step(row: ComparedRow) -> str:
    """Returns the milliseconds of a step; below them what was predicted, and by how much the step takes longer than
    that."""
    measured = f"{row.step_seconds * 1e3:.3g}"
    if row.predicted_seconds is None:
        return measured
    return f"{measured}\n~{row.predicted_seconds * 1e3:.3g}\n{row.error:+.0%}"


def _cells(row: ComparedRow) -> list[Any]:
    return [
        row.strategy.replace("(", "\n("),
        f"{row.workers} x {row.threads}",
        _step(row),
        f"{row.examples_per_second:,.0f}",
        f"{row.times_one_device:.2f}",
        f"{row.computing:.0%}",
        f"{row.waiting:.0%}",
        f"{row.communicating:.0%}",
        "yes" if row.exact else "no",
        _mebibytes(row.held_bytes),
    ]
