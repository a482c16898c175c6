"""The page of a check, from the answer as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

from apportion.reporting.html import tables
from apportion.reporting.html.document import document, numbers, pair, section
from apportion.script_check.hangs.sentences import operation
from apportion.script_check.report.charts import (
    batch_lines,
    heat_map,
    legend,
    loader_facts,
    norm_chart,
    norm_keys,
    row_chart,
    row_keys,
    rows_in_words,
)

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
