"""The number of devices that Lightning is given, and scripts of its Trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.script import Script

pytestmark = pytest.mark.processes
FOLDER = Path(sys.prefix) / "lightning"
SCRIPT = Path(__file__).parent / "stacks" / "lightning_trainer.py"
CONNECTOR = """
class SingleDeviceStrategy: ...
class _Connector:
    def __init__(self, devices="auto", num_nodes=1):
        self._check_device_config_and_set_final_flags(devices=devices, num_nodes=num_nodes)
    def _check_device_config_and_set_final_flags(self, devices, num_nodes):
        self.devices, self.num_nodes = devices, num_nodes
    def _choose_strategy(self):
        return SingleDeviceStrategy() if self.devices == 1 else "ddp"
"""
"""What of Lightning's class the check depends on."""
ASKED = """
import sys
from apportion.script_check.recording import lightning_devices
lightning_devices.install({ranks})
from lightning.fabric.connector import _Connector
made = _Connector({arguments})
print((made.devices, made.num_nodes))
assert {ranks} > 1 or made._choose_strategy() == "ddp"
"""


@pytest.mark.parametrize(
    ("ranks", "arguments", "given"),
    [
        (2, "", (2, 1)),
        (3, "devices=-1", (3, 1)),
        (2, "devices=4", (4, 1)),
        (2, "devices=[0, 1]", ([0, 1], 1)),
        (2, "devices=1, num_nodes=2", (1, 2)),
        (1, "", (1, 1)),
        (1, "devices=4, num_nodes=2", (1, 1)),
        (1, "devices=[0, 1]", (1, 1)),
    ],
)
def test_the_devices_are_as_many_as_the_ranks(ranks: int, arguments: str, given: object, tmp_path: Path) -> None:
    folder = tmp_path / "lightning" / "fabric"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "connector.py").write_text(CONNECTOR)
    text = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + ASKED.format(ranks=ranks, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(given)), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/test slow installs tests/lightning.txt")
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--devices", "auto", "--strategy", "auto"),
        ("--accumulate", "2", "--clip", "0.5"),
    ],
)
def test_a_healthy_script_of_the_trainer_is_the_same_network(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{':'.join(sys.path)}")
    found = check_script(Script(str(SCRIPT), arguments))
    assert found.verdict == "the same network", (found.reason, [finding.sentence for finding in found.findings])
    assert found.compared["steps"] >= 6
