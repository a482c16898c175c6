"""Refusals of arguments that a class or a function of the public interface does not have, with the name that is
meant."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from types import GeneratorType
from typing import Any, ParamSpec, TypeVar, cast

from apportion.errors import UnknownArgument

P = ParamSpec("P")
R = TypeVar("R")


def written(name: str) -> str:
    """Return a name in small letters, its words divided by underscores: ``batch_size`` for ``BatchSize``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()


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
    small = written(name)
    if small in table:
        return table[small]
    close = difflib.get_close_matches(small, known, 1)
    if close:
        return f"did you mean {close[0]}=?"
    close = difflib.get_close_matches(small, table, 1, 0.75)
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


def _refuse_call(where: str, signature: inspect.Signature, positional: int, given: Mapping[str, object]) -> None:
    """Raise UnknownArgument where a function was not given all that it needs, or more without a name than it takes so;
    ValueError where what must be True or False is neither."""
    parameters = signature.parameters.values()
    ordered = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if positional > len(ordered):
        named = ", ".join(f"{p.name}=" for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
        raise UnknownArgument(
            f"{where}() takes {len(ordered)} arguments without their names ({', '.join(ordered)}), and {positional} "
            f"were given: give the others by name, {named}"
        )
    needed = [name for name in ordered if signature.parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in needed[positional:] if name not in given]
    if missing:
        raise UnknownArgument(
            f"{where}() lacks {', '.join(f'{name}=' for name in missing)}: write {where}({', '.join(needed)})"
        )
    for name, value in given.items():
        if signature.parameters[name].annotation in ("bool", bool) and value not in (True, False):
            raise ValueError(f"{name}={value!r} must be True or False, as {name}=False")


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
    TypeError, refuse calls that lack one, and raise its errors without the frames of this package; those of a generator
    that it returns, too. ``meant``: see ``refuse_unknown``; ``like``: the function to which it passes its arguments
    on."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        if like is not None:  # its arguments, and those that the function names itself
            passed = inspect.signature(like).parameters.values()
            own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
            more = [p for p in own if p.name not in {q.name for q in passed}]
            signature = signature.replace(parameters=[*passed, *more])

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                refuse_unknown(f"{function.__name__}()", kwargs, signature.parameters, meant)
                _refuse_call(function.__name__, signature, len(args), kwargs)
                returned = function(*args, **kwargs)
            except BaseException as error:
                _shorten(error)
                raise
            return cast("R", _shortened(returned)) if isinstance(returned, GeneratorType) else returned

        return checked

    return decorated
