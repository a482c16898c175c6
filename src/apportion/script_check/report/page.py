"""The page of a check, from the answer as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log10
from pathlib import Path
from textwrap import dedent
from typing import Any

from apportion.reporting.html import tables
from apportion.reporting.html.document import document, numbers, pair, section
from apportion.script_check.hangs.sentences import operation

Json = Mapping[str, Any]


def hang_sections(answer: Json) -> Iterator[str]:
    """Yield the sections on ranks that wait for each other; nothing where they do not."""
    hang: Json = answer["hang"]
    if divergence := hang.get("first_divergence"):
        calls = divergence["calls"]
        heads = ["rank", "call", "tensors", "line"]
        table = tables.table(heads, [(rank, *_call(call)) for rank, call in calls.items()], texts=4)
        about = f"Call {divergence['sequence'] + 1} of the group {divergence['group']} is the first one that differs."
        yield section("The first collective that differs", f"<p>{escape(about)}</p>{table}")
    if ranks := hang.get("ranks"):
        heads = ["rank", "state", "steps", "waits in", "tensors", "line"]
        states = [(str(each["rank"]), each["state"], str(each["steps"]), *_waiting(each)) for each in ranks]
        body = tables.table(heads, states, texts=6)
        if answer["ranks"]:
            lines = "\n".join(map(escape, answer["ranks"]))
            body += numbers("with the stacks", f"<pre>{lines}</pre>", shown=False)
        yield section("What each rank was doing", body)


def _waiting(rank: Json) -> tuple[str, str, str]:
    return _call(rank["collective"]) if rank["collective"] else ("", "", rank["site"])


def _call(call: Json | None) -> tuple[str, str, str]:
    """Returns the cells of a call: what, of which tensors, at which line."""
    if call is None:
        return ("no call", "", "")
    tensors = ", ".join(f"{kind} {list(shape)}" for shape, kind in (call["inputs"] or call["outputs"] or ()))
    return (operation(call), tensors, str(call["site"]))


def _dashed(number: int) -> str:
    """Returns what makes the lines of all ranks but the first one dashed, so that one below another is seen."""
    return "stroke-dasharray: 7 5; " if number > 1 else ""


_DIFFER = "\n".join(
    f".differ{level} {{ fill: var(--bad); background: var(--bad); opacity: {0.2 + 0.1 * (level - 1):.2g}; }}"
    for level in range(1, 10)
)
_RANKS = "\n".join(
    f".rank{number} {{ fill: var(--series-{number}); background: var(--series-{number}); }} "
    f".line{number} {{ stroke: var(--series-{number}); fill: none; stroke-width: 2; {_dashed(number)}}}"
    for number in range(1, 9)
)
STYLE = f"""
svg.map {{ display: block; margin-top: .4rem; }}
.pair h3, h3.next {{ margin-top: 1rem; }}
svg.rows, svg.norms {{ display: block; width: 100%; height: auto; margin-top: .3rem; }}
svg.norms {{ max-width: 620px; }} svg.rows {{ max-width: 460px; }}
svg text.tick {{ font: 11px var(--type); fill: var(--muted); }}
svg text.name {{ font: 12px var(--mono); fill: var(--ink); }}
.axis {{ stroke: var(--grid); fill: none; }}
.agree {{ fill: var(--good); background: var(--good); opacity: .3; }}
.shared {{ fill: var(--bad); background: var(--bad); }}
.one {{ background: var(--muted); }}
polyline.one {{ stroke: var(--muted); fill: none; stroke-width: 5; opacity: .45; }}
{_DIFFER}
{_RANKS}
.finding {{ border-left: 3px solid var(--bad); padding-left: .9rem; margin-top: 1.1rem; }}
.finding.warning {{ border-color: var(--warn); }}
.finding.note, .finding.accepted {{ border-color: var(--grid); }}
.finding p {{ overflow-wrap: anywhere; }}
.finding .sentence {{ color: var(--ink); font-weight: 600; }}
.finding pre {{ margin-bottom: .4rem; }}
.finding pre b {{ color: var(--bad); }}
.verdict {{ font-size: 1.05rem; color: var(--ink); }}
"""


_STATES = {"the same network": "good", "the same network, but": "warn", "undecided": "warn"}
_MEANING = {
    "another network": "On {ranks} ranks the script trains another network than it does as one process.",
    "the same network, but": "Each step is that of one process, and something beside it is wrong.",
    "the same network": "On {ranks} ranks the script computes what it does as one process.",
    "the ranks wait for each other": "The script does not go on: each rank waits for what another one does not do.",
    "undecided": "It is not known whether the ranks train the network of one process.",
    "could not run": "The script could not be run, and nothing was compared.",
}
_AROUND = 3
"""The lines of the script that are shown before and after that of a finding."""


def check_page(answer: Json, title: str, folder: Path) -> str:
    """Return the whole HTML document. ``answer``: see ``ScriptAnswer.as_json``; ``title``: the script with its
    arguments; ``folder``: the folder of the script, from which lines of it are shown."""
    compared: Json = answer["compared"]
    sections = [_head(answer, title)]
    if answer["findings"]:
        acceptable = not answer["hang"]
        found = "".join(_finding(finding, folder, acceptable) for finding in answer["findings"])
        sections.append(section("What was found", found))
    sections += hang_sections(answer)
    if table := compared.get("table"):
        sections += _steps(table)
    if loaders := [loader for loader in compared.get("loaders", ()) if any(map(any, loader["iterations"]))]:
        sections.append(section("Which rows each rank read", "".join(map(_loader, loaders))))
    if answer["about"]:
        sections.append(section("How it was run", "".join(f"<p>{escape(text)}</p>" for text in answer["about"])))
    html = document(f"{title}: {answer['verdict']}", "\n".join(sections))
    return html.replace("</style>", f"{STYLE}</style>", 1)


def _head(answer: Json, title: str) -> str:
    compared = answer["compared"]
    verdict = str(answer["verdict"])
    meaning = _MEANING[verdict].format(ranks=compared.get("ranks", "several"))
    names = [("ranks", "ranks"), ("steps", "steps compared"), ("tensors", "tensors compared")]
    tiles = [("findings", f"{len(answer['findings'])}")]
    tiles += [(text, f"{compared[name]:,}") for name, text in names if name in compared]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>\n" for name, text in tiles)
    reference = f"<p>Compared with {escape(compared['reference'])}.</p>" if "reference" in compared else ""
    reason = f"<p>{escape(answer['reason'])}</p>" if answer["reason"] else ""
    return (
        f'<header>\n<p class="over">Check of a script</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="verdict"><span class="state {_STATES.get(verdict, "bad")}">{escape(verdict.capitalize())}.</span> '
        f'{escape(meaning)}</p>\n{reason}{reference}\n<dl class="tiles">\n{cells}</dl>\n</header>'
    )


def _finding(finding: Json, folder: Path, acceptable: bool) -> str:
    kind = "accepted" if finding["accepted"] else finding["severity"]
    label = {"accepted": "Accepted: ", "note": "Note: "}.get(kind, "")
    parts = [f'<p class="sentence">{escape(label + finding["sentence"])}</p>']
    if finding["site"]:
        parts.append(_excerpt(finding["site"], folder))
    if finding["remedy"]:
        parts.append(f"<p><b>Fix:</b> {escape(finding['remedy'])}</p>")
    if finding["tensors"]:
        names = ", ".join(finding["tensors"])
        shown = f"<p>Tensors: <code>{escape(names)}</code></p>"
        parts.append(
            shown if len(finding["tensors"]) <= 8 else numbers(f"{len(finding['tensors'])} tensors", shown, shown=False)
        )
    factor = None if finding["factor"] is None else f"{finding['factor']:.6g}"
    facts = [("step", finding["step"]), ("factor", factor)]
    facts += [("ranks", ", ".join(map(str, finding["ranks"])) or None)]
    words = ", ".join(f"{name} {value}" for name, value in facts if value is not None)
    accept = ""
    if acceptable and kind not in ("accepted", "note"):
        accept = f" Accept it with <code>--accept {escape(finding['name'])}</code>."
    parts.append(f'<p class="over">{escape(words.capitalize() + "." if words else "")}{accept}</p>')
    return f'<div class="finding {kind}">{"".join(parts)}</div>'


def _excerpt(site: str, folder: Path) -> str:
    """Returns the lines of the script around a finding; its name alone where they cannot be read."""
    file, _, line = site.partition(" ")[0].rpartition(":")
    title = f"<p><code>{escape(site)}</code></p>"
    try:
        lines = (folder / file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return title
    if not line.isdigit() or not 1 <= int(line) <= len(lines):
        return title
    at = int(line)
    first = max(1, at - _AROUND)
    texts = dedent("\n".join(lines[first - 1 : at + _AROUND])).split("\n")
    numbered = [(first + index, f"{first + index:>4}  {text}") for index, text in enumerate(texts)]
    shown = [f"<b>{escape(text)}</b>" if number == at else escape(text) for number, text in numbered]
    return f"{title}<pre>{chr(10).join(shown)}</pre>"


def _steps(table: Json) -> Iterator[str]:
    if not table["steps"] or not table["tensors"]:
        return
    ranks = len(table["tensors"][0]["gradients"])
    titles = (("gradients", "Gradients before each step"), ("weights", "Weights after each step"))
    body = legend(ranks) + pair([f"<h3>{title}</h3>{heat_map(kind, table)}" for kind, title in titles])
    if table["left_out"]:
        body += f'<p class="over">{table["left_out"]:,} more tensors are left out, which differ no earlier.</p>'
    body += numbers("in numbers", _first_differences(table, ranks), shown=False)
    yield section("Which tensors differ, by step and rank", body)
    if chart := norm_chart(table["steps"]):
        yield section("The norm of all gradients", norm_keys(ranks) + chart)


def _first_differences(table: Json, ranks: int) -> str:
    """Returns the numbers of each tensor at the first step at which its gradient, or else its weight, differs."""
    heads = ["tensor", "what", "step", *(f"rank {rank}: differs by" for rank in range(ranks))]
    heads += [f"rank {rank}: factor" for rank in range(ranks)]
    rows = list[Sequence[str]]()
    for tensor in table["tensors"]:
        for kind in ("gradients", "weights"):
            steps = [at for at in range(len(table["steps"])) if any(values[at] for values in tensor[kind])]
            if steps:
                values = [by_step[steps[0]] for by_step in tensor[kind]]
                factors = tensor["ratios"] if kind == "gradients" else [None] * ranks
                step = str(table["steps"][steps[0]]["step"])
                rows.append([tensor["name"], kind, step, *map(_number, values), *map(_number, factors)])
                break
    if not rows:
        return "<p>No tensor differs.</p>"
    return tables.table(heads, rows, texts=2)


def _number(value: float | None) -> str:
    return "" if value is None else "all of it" if value < 0 else f"{value:.6g}"


def _loader(loader: Json) -> str:
    body = f'<h3 class="next">{escape(loader_facts(loader))}</h3>'
    cells = list[str]()
    for number, iteration in enumerate(loader["iterations"], 1):
        chart = row_chart(iteration, loader["rows"])
        cells.append(f"<div><p>Epoch {number}; {escape(rows_in_words(iteration))}.</p>{chart}</div>")
    ranks = len(loader["iterations"][0])
    body += row_keys(ranks) + f'<div class="pair">{"".join(cells)}</div>'
    if loader["left_out"]:
        body += f'<p class="over">{loader["left_out"]} more epochs are left out.</p>'
    heads = ["batch", *(f"rank {rank}" for rank in range(ranks))]
    first = tables.table(heads, batch_lines(loader["iterations"][0]), texts=len(heads))
    return body + numbers("the rows of the first epoch", first, shown=False)


# Pictures of the page of a check, as SVG: which tensors differ at which steps, the norm of the gradients, and which
# rows each rank reads.


_CELL, _NARROW, _ROW, _CHARACTER = 26, 17, 20, 7.3
_MOST_BROAD = 12
"""The steps up to which cells are broad."""
_LONGEST = 27
"""The characters of a name that are shown beside the picture."""
_MOST_RANKS = 4
"""The ranks that have a part of their own in a cell; of more, the cell shows the largest difference."""
_LEAST, _LARGEST = -9.0, 0.0
"""The powers of ten between which the colour grows."""


def heat_map(kind: str, table: Mapping[str, Any]) -> str:
    """Return the picture as SVG. ``kind``: gradients or weights; ``table``: see ``comparison/tables.py``."""
    tensors, steps = table["tensors"], table["steps"]
    cell = _CELL if len(steps) <= _MOST_BROAD else _NARROW
    left = round(_CHARACTER * min(_LONGEST, max(len(tensor["name"]) for tensor in tensors))) + 10
    width, height = left + cell * len(steps) + 4, _ROW * len(tensors) + 26
    parts = list[str]()
    for at, step in enumerate(steps):
        if len(steps) <= _MOST_BROAD or step["step"] == 1 or not step["step"] % 5:
            middle = left + cell * (at + 0.5)
            parts.append(f'<text x="{middle:g}" y="12" text-anchor="middle" class="tick">{_step(step, steps)}</text>')
    for index, tensor in enumerate(tensors):
        top = 20 + _ROW * index
        parts.append(_label(tensor["name"], left - 8, top + 14))
        by_rank = tensor[kind] if len(tensor[kind]) <= _MOST_RANKS else [_largest(tensor[kind])]
        for at in range(len(steps)):
            parts += _cell(
                [values[at] for values in by_rank], (left + cell * at, top, cell), f"step {steps[at]['step']}"
            )
    return (
        f'<div class="scroll"><svg class="map" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{kind} by tensor and step">{"".join(parts)}</svg></div>'
    )


def legend(ranks: int) -> str:
    """Return what the colours mean."""
    split = f"each cell has a part for each of the {ranks} ranks" if ranks <= _MOST_RANKS else "the worst rank is shown"
    keys = [("agree", "agrees up to rounding")]
    keys += [(f"differ{level}", text) for level, text in ((2, "differs by 1e-7"), (5, "by 1e-4"), (9, "by 1 or more"))]
    items = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in keys)
    return f'<p class="keys">{items}<span>of the norm; {split}</span></p>'


def _step(step: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    several = len({each["optimizer"] for each in steps}) > 1
    return f"{step['optimizer']}:{step['step']}" if several else str(step["step"])


def _label(name: str, x: int, y: int) -> str:
    short = name if len(name) <= _LONGEST else f"…{name[-_LONGEST + 1 :]}"
    return f'<text x="{x}" y="{y}" text-anchor="end" class="name">{escape(short)}<title>{escape(name)}</title></text>'


def _largest(by_rank: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [
        max(
            (value for value in values if value is not None),
            key=lambda value: value if value >= 0 else 1e300,
            default=None,
        )
        for values in zip(*by_rank, strict=True)
    ]


def _cell(values: Sequence[float | None], place: tuple[int, int, int], step: str) -> list[str]:
    """Returns the parts of a cell, one a rank. ``place``: x, y and the width."""
    left, top, whole = place
    width = (whole - 4) / len(values)
    found = list[str]()
    for rank, value in enumerate(values):
        if value is None:
            continue
        about = f"rank {rank}, {step}: " if len(values) > 1 else f"{step}: "
        about += (
            "agrees" if not value else "has another shape, or is not zero" if value < 0 else f"differs by {value:.3g}"
        )
        found.append(
            f'<rect x="{left + 2 + width * rank:.4g}" y="{top + 2}" width="{max(width - 1, 2):.3g}" '
            f'height="{_ROW - 4}" class="{colour(value)}"><title>{about}</title></rect>'
        )
    return found


def colour(value: float) -> str:
    """Return the class of a difference: ``agree``, or ``differ1`` to ``differ9``, a decade each."""
    if not value:
        return "agree"
    power = _LARGEST if value < 0 else log10(value)
    return f"differ{round(1 + 8 * (min(max(power, _LEAST), _LARGEST) - _LEAST) / (_LARGEST - _LEAST))}"


_NORM_WIDTH, _NORM_HEIGHT, _NORM_LEFT, _NORM_BOTTOM = 460, 170, 48, 24
_COLOURS = 8
"""The series that the style sheet has."""


def norm_chart(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG; empty where there are fewer than two steps. ``steps``: see
    ``comparison/tables.py``."""
    ranks = len(steps[0]["norms"]) if steps else 0
    lines = [[step["norms"][rank] for step in steps] for rank in range(ranks)]
    reference = [step["norm"] for step in steps]
    known = [value for line in (*lines, reference) for value in line if value is not None]
    if len(steps) < 2 or not known:
        return ""
    top = max(known) * 1.06 or 1.0
    parts = [
        f'<path d="M{_NORM_LEFT} 6V{_NORM_HEIGHT - _NORM_BOTTOM}H{_NORM_WIDTH}" class="axis"/>',
        f'<text x="{_NORM_LEFT - 6}" y="16" text-anchor="end" class="tick">{top / 1.06:.3g}</text>',
        f'<text x="{_NORM_LEFT - 6}" y="{_NORM_HEIGHT - _NORM_BOTTOM}" text-anchor="end" class="tick">0</text>',
        f'<text x="{_NORM_LEFT}" y="{_NORM_HEIGHT - 6}" class="tick">step 1</text>',
        f'<text x="{_NORM_WIDTH}" y="{_NORM_HEIGHT - 6}" text-anchor="end" class="tick">{len(steps)}</text>',
        _line(reference, top, "one"),
    ]
    parts += [_line(line, top, f"line{rank % _COLOURS + 1}") for rank, line in enumerate(lines)]
    return (
        f'<svg class="norms" viewBox="0 0 {_NORM_WIDTH + 4} {_NORM_HEIGHT}" role="img" '
        f'aria-label="norm of the gradients by step">{"".join(parts)}</svg>'
    )


def norm_keys(ranks: int) -> str:
    """Return the key to the lines."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys"><span><i class="one"></i>one process</span>{"".join(items)}</p>'


def _line(values: Sequence[float | None], top: float, name: str) -> str:
    width, height = _NORM_WIDTH - _NORM_LEFT - 10, _NORM_HEIGHT - _NORM_BOTTOM - 8
    points = " ".join(
        f"{_NORM_LEFT + 5 + width * at / (len(values) - 1):.1f},{8 + height * (1 - value / top):.1f}"
        for at, value in enumerate(values)
        if value is not None
    )
    return f'<polyline points="{points}" class="{name}"/>'


Batches = Sequence[Sequence[int] | int]
_ROWS_WIDTH, _ROWS_HEIGHT, _ROWS_LEFT = 320, 170, 44


def row_chart(iteration: Sequence[Batches], rows: int | None) -> str:
    """Return the picture of one iteration as SVG; empty where the data has no indices. ``iteration``: the batches of
    each rank; ``rows``: the number of rows of the data set. Rows that several ranks read are drawn in red."""
    batches = max(map(len, iteration), default=0)
    read = [(rank, at, index) for rank, own in enumerate(iteration) for at, index in _indices(own)]
    if not read or any(isinstance(batch, int) for own in iteration for batch in own):
        return ""
    top = max(rows or 0, 1 + max(index for _, _, index in read))
    shared = shared_rows(iteration)
    column, height = (_ROWS_WIDTH - _ROWS_LEFT) / batches, _ROWS_HEIGHT - 30
    width, thick = max((column - 3) / len(iteration), 1.0), max(height / top, 1.6)
    marks = list[str]()
    for rank, at, index in read:
        x, y = _ROWS_LEFT + column * at + width * rank, 8 + height * index / top
        name = "shared" if index in shared else f"rank{rank % _COLOURS + 1}"
        size = f'width="{width * 0.86:.3g}" height="{thick:.3g}"'
        marks.append(f'<rect x="{x:.4g}" y="{y:.4g}" {size} class="{name}"/>')
    axis = [
        f'<text x="{_ROWS_LEFT - 6}" y="16" text-anchor="end" class="tick">0</text>',
        f'<text x="{_ROWS_LEFT - 6}" y="{8 + height}" text-anchor="end" class="tick">{top - 1:,}</text>',
        f'<text x="{_ROWS_LEFT}" y="{_ROWS_HEIGHT - 6}" class="tick">batch 1</text>',
        f'<text x="{_ROWS_WIDTH}" y="{_ROWS_HEIGHT - 6}" text-anchor="end" class="tick">{batches}</text>',
        f'<path d="M{_ROWS_LEFT - 2} 6V{8 + height}H{_ROWS_WIDTH}" class="axis"/>',
    ]
    return (
        f'<svg class="rows" viewBox="0 0 {_ROWS_WIDTH} {_ROWS_HEIGHT}" role="img" '
        f'aria-label="rows read by batch and rank">'
        f"{''.join(axis + marks)}</svg>"
    )


def shared_rows(iteration: Sequence[Batches]) -> set[int]:
    """Return the rows that more than one rank reads in an iteration."""
    counts = Counter(index for own in iteration for index in {index for _, index in _indices(own)})
    return {index for index, ranks in counts.items() if ranks > 1}


def rows_in_words(iteration: Sequence[Batches]) -> str:
    """Return how many rows each rank reads, and how many of them others read, too."""
    counts = [sum(batch if isinstance(batch, int) else len(batch) for batch in own) for own in iteration]
    each = ", ".join(f"rank {rank} {rows:,}" for rank, rows in enumerate(counts))
    many = len(shared_rows(iteration))
    shared = "no row is read by two ranks"
    if many:
        shared = f"{many:,} {'row is' if many == 1 else 'rows are'} read by more than one rank"
    indexed = any(not isinstance(batch, int) for own in iteration for batch in own)
    return f"rows: {each}" + (f"; {shared}" if indexed else "")


def row_keys(ranks: int) -> str:
    """Return the key to the colours of the ranks."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys">{"".join(items)}<span><i class="shared"></i>read by several ranks</span></p>'


def batch_lines(iteration: Sequence[Batches]) -> list[tuple[str, ...]]:
    """Return a line of a table for each batch, with a cell for each rank."""
    return [
        (str(at + 1), *(_batch_cell(own[at]) if at < len(own) else "" for own in iteration))
        for at in range(max(map(len, iteration), default=0))
    ]


def _batch_cell(batch: Sequence[int] | int) -> str:
    if isinstance(batch, int):
        return f"{batch} rows"
    return " ".join(map(str, batch[:24])) + (f" and {len(batch) - 24} more" if len(batch) > 24 else "")


def _indices(batches: Batches) -> list[tuple[int, int]]:
    """Returns each index with the number of its batch."""
    return [(at, index) for at, batch in enumerate(batches) if not isinstance(batch, int) for index in batch]


def loader_facts(loader: Mapping[str, Any]) -> str:
    """Return what is known of a loader, in words."""
    rows = f", {loader['rows']:,} rows" if loader["rows"] is not None else ""
    return f"{loader['name']}: {loader['sampler']}{rows}"
