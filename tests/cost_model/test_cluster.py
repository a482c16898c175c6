"""Machines as plain data: JSON, rates and links that are asked for, more hosts, the catalogue."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apportion.cost_model import catalogue, collectives
from apportion.cost_model.cluster import Cluster, Device, Link, Moved, Placement, Rate, layouts


def rate(threads: int, together: int, flops: float, memory: float = 1e10) -> Rate:
    return Rate(threads=threads, together=together, flops=flops, bytes_per_second=memory)


def cpu(name: str = "a/cpu", cores: int = 4, **fields: Any) -> Device:
    rates = (rate(1, 1, 1e10), rate(4, 1, 3e10, 2e10), rate(1, 4, 8e9, 5e9))
    known = {"host": name.split("/")[0], "kind": "cpu", "model": "m", "memory_bytes": 1 << 30, "rates": rates}
    return Device(name=name, cores=cores, **{**known, **fields})  # type: ignore[arg-type]


def memory(*devices: str, **fields: Any) -> Link:
    return Link(**{"kind": "memory", "devices": devices, "latency": 1e-5, "bandwidth": 4e9, "port": "all", **fields})


def two_hosts() -> Cluster:
    table = tuple(Moved(what="all_reduce", ranks=n, nbytes=1 << 20, seconds=0.1 * n) for n in (2, 4))
    network = memory("a/cpu", "b/cpu", kind="ethernet", bandwidth=1e8, port="host", measured=table)
    own = (memory("a/cpu", bandwidth=4e9), memory("b/cpu", bandwidth=5e9))
    return Cluster(name="two", devices=(cpu("a/cpu"), cpu("b/cpu")), links=(*own, network), measured=True)


# JSON


def test_a_cluster_is_the_same_after_json(tmp_path: Path) -> None:
    two_hosts().save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == two_hosts()
    assert Cluster.from_json(json.loads(json.dumps(two_hosts().to_json()))) == two_hosts()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("{}", "not a cluster: 'name' and 'devices' are missing"),
        ('{"name": "x", "devices": [], "links": []}', "needs at least one device"),
        ('{"name": "x", "devices": [{"name": "d", "rates": []}]}', "not a cluster"),
        ('{"name": "x", "devices": [{"rates": [{"thread": 1}]}]}', "thread"),
    ],
)
def test_a_file_that_holds_no_cluster_says_so(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        Cluster.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["devices"][0].update(core=4), "devices[0]: unknown field 'core': did you mean 'cores'?"),
        (lambda c: c["links"][2].pop("latency"), "links[2]: 'latency' is missing"),
        (lambda c: c["devices"][0].update(cores=2.5), "devices[0].cores=2.5: a whole number is wanted"),
        (lambda c: c["devices"][1].update(memory_bytes="8 GiB"), "devices[1].memory_bytes='8 GiB': a whole number"),
        (lambda c: c["devices"][0]["rates"][1].update(flops="1e11"), "devices[0].rates[1].flops='1e11': a number"),
        (lambda c: c["devices"][0]["rates"][1].update(flops=-1.0), "flops=-1.0"),
        (lambda c: c["devices"][0]["rates"][1].update(together=0), "together=0"),
        (lambda c: c["devices"][0].update(cores=0), "device a/cpu: cores=0"),
        (lambda c: c["devices"][0].update(kind="gpu"), "devices[0].kind='gpu': one of cpu, cuda is wanted"),
        (lambda c: c["links"][2].update(port="nic"), "links[2].port='nic': one of device, host, all is wanted"),
        (lambda c: c["links"][2].update(bandwidth=float("nan")), "links[2].bandwidth=nan: a number is wanted"),
        (lambda c: c["links"][2].update(bandwidth=None), "links[2].bandwidth=None: a number is wanted"),
        (lambda c: c["links"][2].update(bandwidth=-1), "bandwidth=-1"),
        (lambda c: c["links"][2].update(hidden=5), "hidden=5"),
        (lambda c: c.update(devices={"a": 1}), "devices={'a': 1}: a list is wanted"),
        (lambda c: c.update(name=5), "name=5: a text is wanted"),
    ],
)
def test_what_is_wrong_in_a_cluster_is_named_with_its_place(change: Any, said: str) -> None:
    data = json.loads(json.dumps(two_hosts().to_json()))
    change(data)
    with pytest.raises(ValueError, match=re.escape(said)):
        Cluster.from_json(data)


@pytest.mark.parametrize("data", [[], "text", None, 5])
def test_json_that_is_no_object_is_no_cluster(data: Any) -> None:
    with pytest.raises(ValueError, match="an object is wanted, with name, devices, links"):
        Cluster.from_json(data)


def test_bytes_may_be_written_as_a_person_does() -> None:
    data = two_hosts().to_json()
    data["devices"][0]["memory_bytes"] = 8e9
    assert Cluster.from_json(data).devices[0].memory_bytes == 8_000_000_000


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rate"):
        cpu(rates=())
    with pytest.raises(ValueError, match="its bandwidth is positive"):
        memory("a/cpu", bandwidth=0.0)
    with pytest.raises(ValueError, match="two devices have the same name"):
        Cluster(name="x", devices=(cpu(), cpu()))
    with pytest.raises(ValueError, match="joins b/cpu, an unknown device"):
        Cluster(name="x", devices=(cpu(),), links=(memory("a/cpu", "b/cpu"),))


# Rates and links


def test_a_measured_rate_is_taken_as_it_is() -> None:
    assert cpu().rate(4, 1) == rate(4, 1, 3e10, 2e10)


def test_another_layout_shares_what_the_nearest_reached() -> None:
    """Two workers of two threads have what one of four has, or four of one; two threads alone their share of it."""
    assert cpu().rate(2, 2).flops == pytest.approx(3e10 / 2)
    assert cpu().rate(2, 2).bytes_per_second == pytest.approx(2e10 / 2)
    assert cpu(rates=(rate(4, 1, 4e10),)).rate(2, 1).flops == pytest.approx(2e10)
    # Nothing is left to give beyond what was measured.
    assert cpu(rates=(rate(4, 1, 4e10),)).rate(8, 1).flops == pytest.approx(4e10)


def test_the_fastest_link_of_two_and_the_slowest_on_the_way() -> None:
    cluster = two_hosts()
    assert cluster.link("a/cpu", "b/cpu").kind == "ethernet"
    assert cluster.link("b/cpu", "b/cpu").bandwidth == 5e9
    assert cluster.joining(["a/cpu", "a/cpu"]).bandwidth == 4e9
    assert cluster.joining(["a/cpu", "b/cpu", "b/cpu"]).kind == "ethernet"
    with pytest.raises(ValueError, match="no link joins a/cpu and b/cpu"):
        replace(cluster, links=cluster.links[:2]).link("a/cpu", "b/cpu")


def test_sums_over_the_ranks_that_were_measured_take_what_was_measured() -> None:
    """Four ranks on two hosts: their own entry, rather than one within the hosts and one between them."""
    layout = Placement(cluster=two_hosts(), devices=("a/cpu", "a/cpu", "b/cpu", "b/cpu"))
    assert collectives.all_reduce(layout, range(4), 1 << 20) == pytest.approx(0.4)
    assert collectives.all_reduce(layout, (0, 2), 1 << 20) == pytest.approx(0.2)


# The catalogue


def test_the_catalogue_has_the_common_machines() -> None:
    hosts = {f"4-hosts-{speed}gbit" for speed in (1, 10, 25)}
    assert set(catalogue.names()) == {"2-cores", "16-cores", "32-cores", "8xv100", "8xa100", "8xh100"} | hosts
    with pytest.raises(ValueError, match="did you mean '8xa100'"):
        catalogue.named("8a100")
    with pytest.raises(ValueError, match="did you mean '8xa100'"):
        catalogue.named("8xA100")
    with pytest.raises(ValueError, match="there are 16-cores, "):
        catalogue.named("?")


@pytest.mark.parametrize("name", catalogue.names())
def test_a_cluster_of_the_catalogue_makes_sense(name: str) -> None:
    cluster = catalogue.named(name)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert not cluster.measured
    assert "taken as" in cluster.name, "where its numbers are from"
    for layout in layouts(cluster):
        assert collectives.all_reduce(layout, range(layout.ranks), 1e6) >= 0.0
        for rank in layout.kinds:
            device, key = layout.device(rank), (layout.threads, layout.together(rank))
            assert key in {(r.threads, r.together) for r in device.rates}, "every layout worth a look has its rate"
    for device in cluster.devices:
        alone = device.rate(1, 1)
        for known in device.rates:
            assert known.flops <= known.threads * alone.flops, "threads do not help each other"
            assert known.bytes_per_second <= known.threads * alone.bytes_per_second
            assert known.threads * known.together <= device.cores
