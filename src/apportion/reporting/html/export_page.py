"""The page of an exported file: drawn from what ``Exported.to_json`` gives, whichever the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from apportion.reporting.html import tables
from apportion.reporting.html.document import document, section

Json = Mapping[str, Any]


def export_page(made: Json) -> str:
    """Return the whole HTML document of an exported file."""
    sections = [
        _head(made),
        section("How it was verified", _verifications(made["verifications"])),
        *(section(table["title"], _table(table)) for table in made["tables"]),
        section("The file", tables.facts(_facts(made["about"]))),
    ]
    return document(f"Export of {made['path']}", "\n".join(sections))


def _head(made: Json) -> str:
    tiles = [("size", tables.size(made["nbytes"]))]
    if made["verifications"]:
        worst = max(float(one["network_difference"]) for one in made["verifications"])
        tiles.append(("outputs differ from the network's by", f"{worst:.2g}"))
        judged = max(made["verifications"], key=lambda one: int(one["held_out"]))
        for name, before in judged["before"].items():
            tiles += [(f"{name} of the net", _cell(before)), (f"{name} of the file", _cell(judged["after"][name]))]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>\n" for name, text in tiles)
    conclusion = f"<p>{escape(made['conclusion'])}</p>\n" if made["conclusion"] else ""
    return (
        f'<header>\n<p class="over">Export</p>\n<h1>{escape(made["path"])}</h1>\n'
        f"<p><code>{escape(made['target'])}</code></p>\n{conclusion}"
        f'<dl class="tiles">\n{cells}</dl>\n</header>'
    )


def _verifications(verifications: Sequence[Json]) -> str:
    heads = ["reader", "simulated by", "examples", "outputs differ by", "limit", "from the network's own by"]
    metrics = list(dict.fromkeys(name for one in verifications for name in one["before"]))
    for name in metrics:
        heads += [f"{name} of the net", f"{name} of the file"]
    rows = [
        [
            one["reader"],
            one["simulated_by"] or "",
            f"{one['examples']:,}",
            f"{float(one['difference']):.2e}",
            f"{float(one['limit']):.0e}",
            f"{float(one['network_difference']):.2g}",
            *(_cell(one[side].get(name)) for name in metrics for side in ("before", "after")),
        ]
        for one in verifications
    ]
    held_out = max((one["held_out"] for one in verifications), default=0)
    taken = f" The metrics were taken on {held_out:,} examples that no choice was made by." if held_out else ""
    note = (
        "<p>Each reader has computed the examples with the file. The difference is the largest of any output from what "
        f"the file is to compute, relative to the largest number in that output.{taken}</p>"
    )
    return note + tables.table(heads, rows, texts=2)


def _table(table: Json) -> str:
    texts = next((at for at in range(len(table["columns"])) if _numbers(table["rows"], at)), len(table["columns"]))
    rows = [[_cell(cell) for cell in row] for row in table["rows"]]
    note = f"<p>{escape(table['note'])}</p>" if table["note"] else ""
    return note + tables.table(table["columns"], rows, texts=texts)


def _numbers(rows: Sequence[Sequence[Any]], at: int) -> bool:
    """True where every cell of a column is a number."""
    return all(isinstance(row[at], int | float) for row in rows)


def _facts(about: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What the target says of the file, a name and a text each."""
    for name, value in about.items():
        said = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _facts(value, f"{said}: ")
        else:
            yield said, _cell(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_cell(one) or "any" for one in value)
    return str(value)
