"""The program that runs a module under the hook of a copy.

``python -m apportion.script_check.sandbox.guarded MIRROR.json MODULE ARGUMENTS``.
"""

from __future__ import annotations

import runpy
import sys

from apportion.script_check.sandbox.guard import Guard, wrap_compiled_writers
from apportion.script_check.sandbox.mirror import Mirror


def main() -> None:
    """Install the hook, and run the module as ``python -m`` does."""
    description, module, *arguments = sys.argv[1:]
    guard = Guard(Mirror.load(description))
    wrap_compiled_writers(guard)
    guard.install()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
