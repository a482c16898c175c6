"""What ``check`` and ``compare`` have found, and which proofs are cached, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from apportion.cli.flags import in_flags
from apportion.reporting.console import FrankConsole
from apportion.runtime.proof.proof_text import proof_lines

if TYPE_CHECKING:
    from apportion.api.side_by_side import Trained
    from apportion.runtime.proof.proof import Proof


def show_proof(proof: Proof) -> None:
    """Prints what ``check`` found, in words."""
    console = FrankConsole(soft_wrap=True, highlight=False, markup=False)
    for line in proof_lines(proof, in_flags):
        console.print(line)


def show_grid(trained: Sequence[Trained]) -> None:
    """Prints a table of the members of a grid: what they have been trained with, and how well they do."""
    from apportion.reporting.journal import read_events, summary

    rows = [
        {row.name: row.text for row in summary(read_events(one.run_dir)) if row.name.startswith(("final ", "test "))}
        if (one.run_dir / "events.jsonl").is_file()
        else {}
        for one in trained
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, pad_edge=False)
    table.add_column("member")
    for name in columns:
        table.add_column(name, justify="right")
    for one, row in zip(trained, rows, strict=True):
        failed = "" if one.status == 0 else f" (exit status {one.status})"
        table.add_row(one.member.name + failed, *(row.get(name, "") for name in columns))
    FrankConsole(soft_wrap=True, highlight=False, markup=False).print(table)


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
