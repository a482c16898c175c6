"""The number of devices that Lightning's Trainer and Fabric are given, which have to be as many as there are ranks.

In a pass of one process it is 1, whatever the script gives. On several ranks ``"auto"``, which is 1 on a machine
without a GPU, means one for each rank; another number is the script's own, and Lightning refuses it. The strategy that
Lightning chooses by itself for one device would call the network past its wrapper: it is that of several devices.
"""

from __future__ import annotations

from functools import partial, wraps
from types import ModuleType
from typing import Any

from apportion.script_check.imported_modules import ImportedModules

_CONNECTORS = {
    "lightning.fabric.connector": "_Connector",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning_fabric.connector": "_Connector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
}
"""The class of each module that reads these arguments."""
_ALL = ("auto", "-1", -1)


def install(ranks: int) -> None:
    """Set the number of devices as those modules are imported."""
    ImportedModules({module: partial(_set_devices, name, ranks) for module, name in _CONNECTORS.items()}).install()


def _set_devices(name: str, ranks: int, module: ModuleType) -> None:
    connector: Any = getattr(module, name, None)
    check = getattr(connector, "_check_device_config_and_set_final_flags", None)
    if check is None:
        return

    @wraps(check)
    def checked(self: Any, devices: Any, num_nodes: Any) -> Any:
        if ranks == 1:
            devices = num_nodes = 1
        elif devices in _ALL:
            devices = ranks
        return check(self, devices=devices, num_nodes=num_nodes)

    connector._check_device_config_and_set_final_flags = checked
    choose = getattr(connector, "_choose_strategy", None)
    if choose is None or ranks > 1:
        return

    @wraps(choose)
    def chosen(self: Any) -> Any:
        found = choose(self)
        return "ddp" if type(found).__name__ == "SingleDeviceStrategy" else found

    connector._choose_strategy = chosen
