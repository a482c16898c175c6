"""A command line that ends with ``-- ARGS``, the arguments of a script."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_OWN = "apportion.script_arguments"
_HINT = "the arguments of a script follow --, as in: apportion check train.py --workers 2 -- --lr 0.1"
_ALIASES = {"--nproc_per_node": "--workers", "--nproc-per-node": "--workers"}
"""The names that torchrun has for an option."""


class WithScriptArguments(TyperCommand):
    """A command for which all words after the first ``--`` are the arguments of a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before ``--``; those after it are what ``script_arguments`` returns."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_OWN] = tuple(args[at + 1 :])
        parts = [word.partition("=") for word in args[:at]]
        given = [_ALIASES.get(name, name) + equals + value for name, equals, value in parts]
        try:
            return super().parse_args(ctx, given)
        except Exception as error:
            message = getattr(error, "message", None)
            if isinstance(message, str) and (hasattr(error, "option_name") or "unexpected extra argument" in message):
                error.message = f"{message.rstrip('.')}: {_HINT}"  # type: ignore[attr-defined]
            raise


def script_arguments(context: Any) -> tuple[str, ...]:
    """Returns the words that follow ``--`` on the command line."""
    found: tuple[str, ...] = context.meta[_OWN]
    return found
