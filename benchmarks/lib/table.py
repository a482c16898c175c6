"""The table that a benchmark prints, its rows as JSON, and its command line."""

import argparse
import functools
import json
from pathlib import Path

from parked import SideFailed


def result(name, what, unit, measure):
    """One row: what `measure()` gives as (ours, peer, ratio), or as these and more in a dict; or the reason, where a
    side failed."""
    row = {"id": name, "what": what, "ours": None, "peer": None, "unit": unit, "ratio": None}
    try:
        found = measure()
    except SideFailed as failure:
        return row | {"failed": str(failure)}
    if isinstance(found, dict):
        return row | found
    ours, peer, ratio = found
    return row | {"ours": ours, "peer": peer, "ratio": ratio}


def measured(measurements):
    """For `main`: one row after the other, each by itself."""

    def results(names, **options):
        return (
            result(n, m.what, m.unit, functools.partial(m.measure, **options))
            for n, m in measurements.items()
            if n in names
        )

    return results


def line(row):
    """A row in words."""
    if "failed" in row:
        return f"{row['id']:<20}FAILED  {row['failed']}"
    figures = "".join(f"{row[side]:>12.4g}" for side in ("ours", "peer"))
    return f"{row['id']:<20}{figures}  {row['unit']:<12}{row['ratio']:>6.3f}  {row['what']}"


def main(doc, known, results, **options):
    """Print and save what `results(names, **options)` yields, as it comes; the exit status is 1 where a row failed.
    `options`: what the command line may set to something else, with the values that they have otherwise."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", metavar="id,...", help="of " + ", ".join(known))
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}: it is one of {', '.join(known)}")
    print(f"{'id':<20}{'ours':>12}{'peer':>12}  {'unit':<12}{'ratio':>6}  what")
    rows = []
    for row in results(names, **{name: getattr(arguments, name) for name in options}):
        rows.append(row)
        print(line(row), flush=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any("failed" in row for row in rows))
