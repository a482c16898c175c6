"""What the command line prints: arguments of Python in a message are written as the flags that give them."""

from __future__ import annotations

import re

_WHOLE = {
    "resume=True": "--resume",
    "check=False": "--no-check",
    "trial=False": "--no-trial",
    "trust=True": "--trust",
    "remeasure=True": "--remeasure",
    "require_proof=True": "--require-proof",
    "reprove=True": "--reprove",
    "allow_approximate=True": "--allow-approximate",
    "launcher=env()": "--launcher env",
    "launcher=ssh('a', 'b')": "--hosts a,b",
}
"""The flags for arguments with their values."""
_NAMES = ("run_dir", "launcher", "policy", "strategy", "network", "cluster", "against")
"""The arguments whose flags take a value."""
_ARGUMENT = re.compile(
    rf"(?<![\w.(])(?:(?P<whole>{'|'.join(map(re.escape, _WHOLE))})(?!\w)"
    rf"|(?P<name>{'|'.join(_NAMES)})=(?P<value>\w|['\"])?)"
)
_CALL = re.compile(r"apportion\.\w+\([^)]*\)*")


def in_flags(text: str) -> str:
    """Returns a message with its arguments as flags. What is written as a call of Python stays as it is."""
    pieces, end = list[str](), 0
    for call in _CALL.finditer(text):
        pieces += [_ARGUMENT.sub(_flag, text[end : call.start()]), call[0]]
        end = call.end()
    return "".join([*pieces, _ARGUMENT.sub(_flag, text[end:])])


def _flag(found: re.Match[str]) -> str:
    if found["whole"] is not None:
        return _WHOLE[found["whole"]]
    flag = f"--{found['name'].replace('_', '-')}"
    return flag if found["value"] is None else f"{flag} {found['value']}"
