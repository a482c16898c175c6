"""What the page of a check adds to the style sheet of all pages."""

from __future__ import annotations


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
