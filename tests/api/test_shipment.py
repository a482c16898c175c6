"""What goes to every host: the pickled job, up to a limit."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import pytest

from apportion.api.shipment import HostVerb, shipment_of
from apportion.runtime.launch.ssh import Ssh


def test_a_job_of_the_most_bytes_goes_to_the_hosts_and_one_of_a_byte_more_does_not(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("")
    address, most = f"{tmp_path}/work.py:workload", 64 << 20
    launcher = Ssh(hosts=("a", "b"))
    extra = len(cloudpickle.dumps(HostVerb(verb=bytes(most), launcher=launcher))) - most
    largest = HostVerb(verb=bytes(most - extra), launcher=launcher)
    assert len(shipment_of(address, largest).payload) == most
    with pytest.raises(ValueError, match=r"has 67,108,865 bytes, and 64 MB .* have data= open them on each host"):
        shipment_of(address, HostVerb(verb=bytes(most - extra + 1), launcher=launcher))
