"""How the command line ends where something goes wrong: one message, and the exit status of its kind."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from apportion.cli.flags import in_flags
from apportion.errors import ApportionError, Disproved, NotFinite, NotVerified, RanksDiffer, WorkerFailed

NO, WRONG_USE, FAILED, INTERRUPTED = 1, 2, 3, 130
EXTRAS = {
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "onnx"),
    **dict.fromkeys(("httptools", "orjson", "prometheus_client", "simdjson"), "serve"),
    **dict.fromkeys(("jax", "jaxlib", "libtpu", "torchax"), "tpu"),
    **dict.fromkeys(("nir", "h5py"), "spiking"),
    **dict.fromkeys(("gymnasium", "Box2D", "pygame", "ale_py"), "rl"),
    **{name: name for name in ("ray", "tensorboard")},
    "alkaid": "fpga",
    "matplotlib": "report",
}
"""The extra of this package that installs a missing package."""


@contextmanager
def guarded() -> Iterator[None]:
    """Prints what goes wrong as one message with the cause and the cure, and ends with the exit status of its kind."""
    warnings.showwarning = lambda message, *_: click.echo(f"warning: {in_flags(str(message))}", err=True)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except ValueError as error:
        _print_error(error)
        raise click.exceptions.Exit(WRONG_USE) from None
    except (Disproved, NotFinite, NotVerified, RanksDiffer) as error:
        _print_error(error)
        raise click.exceptions.Exit(NO) from None
    except WorkerFailed as error:
        _print_error(error)
        if error.where is not None:
            click.echo(f"  at {error.where}", err=True)
        if error.traceback is not None:
            click.echo(f"rank {error.rank}'s traceback:\n{error.traceback}", err=True)
        raise click.exceptions.Exit(FAILED) from None
    except (ApportionError, ImportError, OSError) as error:
        extra = EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        cure = f": in a clone of apportion, pip install '.[{extra}]'" if extra else ""
        _print_error(error, cure)
        raise click.exceptions.Exit(FAILED) from None
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but the last words
        click.echo(in_flags("\n".join(_notes(interrupt) or ["interrupted"])), err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def _print_error(error: Exception, cure: str = "") -> None:
    click.echo(f"error: {in_flags(str(error))}{cure}", err=True)


def _notes(error: BaseException | None) -> list[str]:
    """Returns what an interrupted run has reported, also where a second Ctrl-C came while it did."""
    return [] if error is None else getattr(error, "__notes__", []) or _notes(error.__context__)
