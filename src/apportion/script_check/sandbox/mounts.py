"""Arranges the mounts of a namespace so that what is written to the user's folders goes to a layer that is discarded.

The folders of a scope become overlays, whose upper layer is a tmpfs that ends with the namespace; everything else is
read-only, but the folder of the records. All of them are prepared while the tree is still as it was, and then moved to
their places, parents first: so each one's lower layer is the user's real folder, also where another one covers it.
"""

from __future__ import annotations

import os

from apportion.script_check.sandbox import linux
from apportion.script_check.sandbox.layers import Layers, Prepared, require_own
from apportion.script_check.sandbox.mount_table import MountTable
from apportion.script_check.sandbox.scope import FileScope, within

SHARED_MEMORY = "/dev/shm"
STAGE = "layers"
"""The folder in that of the records below which mounts are prepared; it is empty outside of the namespace."""


def protect(scope: FileScope, records: str, user_namespace: bool) -> None:
    """Arrange the mounts of this process's own namespace; ``records`` is the folder that stays writable.

    Raises OSError where the kernel does not allow it, or where a folder that the scope needs cannot be an overlay.
    """
    for path in scope.needed:
        if user_namespace and path not in scope.temporary:
            require_own(path)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    table = MountTable.read()
    table.set_read_only()
    stage = os.path.join(records, STAGE)
    linux.mount("tmpfs", stage, "tmpfs", options="mode=755")
    layers = Layers(stage, records, table, user_namespace)
    for path in _outermost(scope):
        layers.prepare(path, needed=scope.needed, temporary=path in scope.temporary)
    if os.path.isdir(SHARED_MEMORY):
        layers.prepare_empty(SHARED_MEMORY, mode=0o1777)
    for each in layers.prepared():
        _move(each)
    layers.close()


def _outermost(scope: FileScope) -> list[str]:
    """The folders of a scope, without those in another one."""
    paths = dict.fromkeys((*scope.needed, *scope.temporary, *scope.named))
    return [path for path in paths if not within(path, [other for other in paths if other != path])]


def _move(prepared: Prepared) -> None:
    os.makedirs(prepared.path, exist_ok=True)  # where it is below a tmpfs that is empty
    linux.mount(f"/proc/self/fd/{prepared.descriptor}", prepared.path, flags=linux.MS_MOVE)
    os.close(prepared.descriptor)
