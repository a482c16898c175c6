"""The execution of what ``torch.compile`` was given as it is written, where a forward is looked at, traced, or cut.

The compiler follows a forward by itself: it would compile what looks at the forward together with it, or follow a
module whose layers were exchanged. So a part that compiles itself does so only where the network runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from apportion.core import torch_private


def as_written() -> AbstractContextManager[object]:
    """Run nothing that was compiled within this context. A step may ask for it: it takes some microseconds."""
    return torch.compiler.set_stance("force_eager") if torch_private.compiler_is_imported() else nullcontext()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run nothing that was compiled within this context, where a forward is looked at; one that is traced is followed
    into what compiles itself."""
    if not torch_private.compiler_is_imported():  # then nothing was compiled, and importing the compiler takes seconds
        yield
        return
    with as_written(), torch_private.traced_through_compiled():
        yield
