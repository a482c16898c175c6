"""A picture of a terminal, as SVG, with a command and what it prints."""

import re
from html import escape, unescape

_COLUMN, _LINE, _MARGIN, _BAR = 8.43, 20, 20, 34
_LEAST_COLUMNS = 80
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace"
_STYLE = (
    f"text{{font:14px {_FONT};fill:#d6d9de;white-space:pre}}"
    ".bold{font-weight:700}.bad{fill:#ff7b72;font-weight:700}.label{fill:#79c0ff}.soft{fill:#8b929b}.prompt{fill:#7ee787}"
)


def terminal_picture(command, text):
    """The SVG. ``text``: lines as they are printed where there is no terminal; the colours are those of one."""
    lines = [("prompt", f"$ {command}"), ("", "")]
    verdict, _, rest = text.rstrip().partition("\n\n")
    lines += [("bad", line) for line in verdict.split("\n")] + [("", "")]
    lines += [(_kind(line), line) for line in rest.split("\n")]
    columns = max(_LEAST_COLUMNS, *(len(line) for _, line in lines))
    width, height = round(columns * _COLUMN) + 2 * _MARGIN, _BAR + len(lines) * _LINE + _MARGIN
    body = [_row(kind, line, _BAR + _LINE * (index + 1) - 6) for index, (kind, line) in enumerate(lines)]
    dots = [f'<circle cx="{20 + 18 * at}" cy="18" r="5.5" fill="{c}"/>' for at, c in enumerate(_DOTS)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(command)}">\n<style>{_STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" rx="10" fill="#161b22"/>\n{"".join(dots)}\n'
        + "\n".join(row for row in body if row)
        + "\n</svg>\n"
    )


_DOTS = ("#ff5f57", "#febc2e", "#28c840")


def words(picture):
    """The lines of text in a picture, the command first."""
    rows = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    return [unescape(re.sub(r"<[^>]+>", "", row)) for row in rows]


def _kind(line):
    return "soft" if line.startswith("  accept with") or (line and not line.startswith(" ")) else ""


def _row(kind, line, y):
    if not line:
        return ""
    label = re.match(r"  (tensors:|at|fix:) ", line)
    if label:
        inside = f'  <tspan class="label">{label[1]}</tspan>{escape(line[label.end() - 1 :])}'
        return f'<text x="{_MARGIN}" y="{y}" xml:space="preserve">{inside}</text>'
    return f'<text x="{_MARGIN}" y="{y}" class="{kind}" xml:space="preserve">{escape(line)}</text>'
