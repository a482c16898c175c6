"""What `apportion check` prints about scripts with a mistake: the gallery of docs/check_scripts.md, and the picture in
the README.

    python benchmarks/gallery.py                    checks all, and writes both
    python benchmarks/gallery.py divided_twice ...  checks these, and prints what it would write

The scripts are those of benchmarks/mistakes, and examples/digits_ddp.py for the picture. A mistake that is not found is
left out of the page and named, and the exit status is 1. Nothing is timed.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from terminal_picture import terminal_picture

from apportion.script_check.findings import FINDING_NAMES

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = ROOT / "benchmarks" / "mistakes"
PAGE = ROOT / "docs" / "check_scripts.md"
PICTURE = ROOT / "docs" / "check_scripts.svg"
EXAMPLE = "examples/digits_ddp.py"
COMMAND = f"apportion check {EXAMPLE} --workers 2"
BLOCK = re.compile(r"(<!-- (gallery|names) -->\n).*?(<!-- end of (?:gallery|names) -->)", re.DOTALL)
SECONDS = 300


def names():
    """The scripts with a mistake."""
    return sorted(path.stem for path in MISTAKES.glob("*.py") if path.stem != "common")


def title(name):
    """What is wrong with a script, in its own words."""
    return ast.get_docstring(ast.parse((MISTAKES / f"{name}.py").read_text())).splitlines()[0]


def printed(script):
    """The exit status, and what the command prints about a script on two ranks."""
    command = [sys.executable, "-m", "apportion", "check", str(script), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout


def findings(text):
    """The paragraphs of what the command prints that are findings, without the notes."""
    paragraphs = text.rstrip().split("\n\n")
    return [each for each in paragraphs if each.startswith("  ") and not each.startswith("  Note: ")]


def entry(name):
    """The part of the page on a script; None where its mistake was not found."""
    status, text = printed(MISTAKES / f"{name}.py")
    found = findings(text)
    if status != 1 or not found:
        return None
    shown = "\n\n".join(found)
    return f"**{title(name)}** [{name}.py](../benchmarks/mistakes/{name}.py)\n\n```text\n{shown}\n```\n"


def written(page):
    """The parts of the page, by the name of the script."""
    parts = re.findall(r"\*\*[^*]+\*\* \[(\w+)\.py\]\([^)]*\)\n\n```text\n.*?\n```\n", page, re.DOTALL)
    texts = re.findall(r"\*\*[^*]+\*\* \[\w+\.py\]\([^)]*\)\n\n```text\n.*?\n```\n", page, re.DOTALL)
    return dict(zip(parts, texts, strict=True))


def picture(text):
    """The picture of the example: without the last sentences, which name folders of the machine."""
    return terminal_picture(COMMAND, text.partition("\nThe script ran in ")[0])


def accepted():
    """The table of the names that ``--accept`` takes."""
    rows = "".join(f"| `{name}` | {about} |\n" for name, about in FINDING_NAMES.items())
    return f"| name | what is found |\n|---|---|\n{rows}"


def main(chosen):
    missed, parts = [], []
    for name in chosen or names():
        part = entry(name)
        print(part or f"{name}: not found", flush=True)
        parts += [part] if part else []
        missed += [] if part else [name]
    if not chosen:
        blocks = {"gallery": "\n" + "\n".join(parts) + "\n", "names": accepted()}
        PAGE.write_text(BLOCK.sub(lambda block: block[1] + blocks[block[2]] + block[3], PAGE.read_text()))
        PICTURE.write_text(picture(printed(EXAMPLE)[1]))
    if missed:
        print(f"not found: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
