"""Refusals of arguments that a class or a function of the public interface does not have, with the name that is
meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from types import GeneratorType
from typing import Any, ParamSpec, TypeVar, cast

from apportion.errors import UnknownArgument

P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown(where: str, given: Iterable[str], known: Collection[str], meant: str) -> None:
    """Raise UnknownArgument for the first name in ``given`` that is not in ``known``. ``where``: what they were given
    to, as ``Workload``; ``meant``: the table of ``argument_names`` with other libraries' names, where there is one."""
    for name in given:
        if name not in known:
            raise UnknownArgument(f"{where} has no argument {name}=: {remedy(name, known, meant)}")


def remedy(name: str, known: Collection[str], meant: str) -> str:
    """Return what to write instead of a name that is not known, in words. ``meant``: see ``refuse_unknown``."""
    from apportion.core import argument_names  # only a mistake needs it

    table: Mapping[str, str] = getattr(argument_names, meant.upper(), {})
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name.lower(), known, 1)
    if close:
        return f"did you mean {close[0]}=?"
    close = difflib.get_close_matches(name.lower(), table, 1, 0.75)
    listed = f"it has {', '.join(known)}" if known else "it has none"
    return f"{table[close[0]]} ({listed})" if close else listed


def refuse_fields(
    where: str, positional: int, given: Mapping[str, object], fields: Mapping[str, bool], meant: str
) -> None:
    """Raise UnknownArgument where a description was given something without its name, under a name that it does not
    have, or not everything that it needs. ``fields``: its names, and whether each is needed."""
    needed = [name for name, needs in fields.items() if needs]
    if positional:
        raise UnknownArgument(
            f"{where} takes its fields by name, and {positional} {'was' if positional == 1 else 'were'} given without: "
            f"write {where}({', '.join(f'{name}=...' for name in needed)})"
        )
    refuse_unknown(where, given, fields, meant)
    missing = [name for name in needed if name not in given]
    if given and missing:
        raise UnknownArgument(
            f"{where} lacks {', '.join(f'{name}=' for name in missing)}: write "
            f"{where}({', '.join(f'{name}=...' for name in needed)})"
        )


def _shorten(error: BaseException) -> None:
    from apportion.core.own_frames import without_own_frames  # only an error needs it

    without_own_frames(error)


def _shortened(events: GeneratorType[Any, Any, Any]) -> Iterator[Any]:
    """Yields what a generator does, and raises its errors without the frames of this package."""
    try:
        yield from events
    except GeneratorExit:
        raise
    except BaseException as error:
        _shorten(error)
        raise


def named_arguments(
    meant: str, *, like: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of the public interface refuse arguments that it does not have with the remedy instead of a bare
    TypeError, and raise its errors without the frames of this package; those of a generator that it returns, too.
    ``meant``: see ``refuse_unknown``; ``like``: the function to which it passes its arguments on."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(like or function).parameters.values()
        known = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                refuse_unknown(f"{function.__name__}()", kwargs, known, meant)
                returned = function(*args, **kwargs)
            except BaseException as error:
                _shorten(error)
                raise
            return cast("R", _shortened(returned)) if isinstance(returned, GeneratorType) else returned

        return checked

    return decorated
