"""The measured figures of README.md and docs: a file of benchmarks/results for each table, and the pages that show it.

    python benchmarks/results.py fill [--check]     write each table into the pages that name it
    python benchmarks/results.py measure NAME       run its command again and keep what it measures

A page names a table by two comments, `<!-- results: NAME -->` and `<!-- end of results -->`; what stands between them
is written here: the table, and below it the command, the commit and the processor. A file has `command`, `commit`,
`date`, `processor`, `software`, `columns`, `rows` and, where the command writes JSON, `measured`, by the `id` (or the
`strategy`) of its rows. A cell is a text in which `{NAME[FIELD]:FORMAT}` stands for a measured number; cells without
one were copied by hand from what the command printed.

`fill --check` writes nothing, and ends with 1 where a page does not show what the files hold.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def pages():
    """The pages that may show results."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def read(name):
    """One file of results. Raises SystemExit where there is none."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"there is no benchmarks/results/{name}.json; there are: {', '.join(names())}")
    return json.loads(path.read_text())


def names():
    """The names of all files of results."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def line(cells):
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |" if any(cells) else ""


def table(found):
    """The lines of a block of a page: the table, an empty line, and where its figures come from."""
    measured = found.get("measured", {})
    rows = [[cell.format_map(measured) if measured else cell for cell in row] for row in found["rows"]]
    source = (
        f"Measured by `{found['command']}` at commit `{found['commit']}` ({found['date']}) on {found['processor']}, "
        f"{found['software']}."
    )
    lines = [line(found["columns"]), "|" + "---|" * len(found["columns"]), *map(line, rows), "", source]
    return "\n".join(lines) + "\n"


def filled(text):
    """A page with the tables that it names, as the files hold them."""
    return BLOCK.sub(lambda block: block[1] + table(read(block[2])) + block[4], text)


def fill(check):
    """Write the pages, or name those that differ. Returns the exit status."""
    stale = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.relative_to(ROOT)} does not show what benchmarks/results holds: run results.py fill")
        else:
            page.write_text(filled(page.read_text()))
    return int(check and bool(stale))


def processor():
    """This machine's processor, and the number of cores that may be used."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    model = found[1].strip() if found else "a processor that names no model"
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def git(*command):
    """What a command of git prints."""
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def measure(name):
    """Run the command of a file again, and write its figures, the commit, the date and the machine."""
    import torch

    found = read(name)
    if "measured" not in found:
        raise SystemExit(f"{name}.json holds figures that were copied by hand from: {found['command']}")
    if git("status", "--porcelain", "src", "benchmarks/*.py", "benchmarks/*/*.py", "examples"):
        raise SystemExit("src, benchmarks or examples differ from the last commit: commit them, then measure")
    program, *arguments = shlex.split(found["command"])
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        if program == "apportion":
            command = [sys.executable, "-m", "apportion", *arguments, "--out", file.name]
        else:
            command = [sys.executable, *arguments, "--json", file.name]
        subprocess.run(command, cwd=ROOT, check=True)
        rows = json.loads(Path(file.name).read_text())
    found["measured"] = {row.get("id") or row["strategy"]: row for row in rows}
    found |= {"commit": git("rev-parse", "--short", "HEAD"), "date": f"{datetime.date.today()}"}
    found |= {"processor": processor(), "software": f"torch {torch.__version__.partition('+')[0]}"}
    table(found)  # a cell that asks for what was not measured fails before the file is written
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("fill").add_argument("--check", action="store_true")
    verbs.add_parser("measure").add_argument("name", choices=names())
    given = parser.parse_args()
    if given.verb == "measure":
        measure(given.name)
    else:
        raise SystemExit(fill(given.check))
