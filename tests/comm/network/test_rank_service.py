"""Ranks that come and go find rank 0, which waits for none of them."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from commands import free_port

from apportion.comm.network import rendezvous
from apportion.comm.network.address import route_to
from apportion.comm.network.meeting_place import ANYWHERE
from apportion.comm.network.rendezvous import RankService
from apportion.errors import ApportionError

SECONDS = 5.0


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_a_rank_of_another_host_finds_where_rank_0_listens(
    monkeypatch: pytest.MonkeyPatch, under_torchrun: bool
) -> None:
    """Under torchrun its store listens at MASTER_PORT, and says at which port rank 0 does."""
    try:
        route_to(ANYWHERE)
    except ApportionError as error:
        pytest.skip(str(error))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS)
    )
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    monkeypatch.setenv("MASTER_PORT", str(store.port if under_torchrun else free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(under_torchrun))
    monkeypatch.setattr(rendezvous, "DEADLINE_SECONDS", SECONDS)
    first, other = (RankService(one_host=False, insecure=True) for _ in range(2))
    listener = first.listen()
    try:
        with other.dial(1, SECONDS, lambda: False) as ours, listener.take(first.name, 1, SECONDS) as theirs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
    finally:
        listener.close()
