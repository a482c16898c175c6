"""The world of a process: where it stands among the others. Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT, alone; and what srun and mpirun say instead of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apportion.comm import p2p
from apportion.comm.channel import Channel
from apportion.comm.group import Alone, Group, WaitClock, collective, gather_messages
from apportion.comm.host_memory import host_memory, shared_memory
from apportion.comm.membership import MemberPlace, Membership
from apportion.comm.network import launched_ranks
from apportion.comm.network.address import Address, is_loopback
from apportion.comm.network.launched_ranks import NAMES, host_key, number
from apportion.comm.shared_memory_group import SharedMemoryGroup, nbytes
from apportion.errors import ApportionError, PeerLost
from apportion.process import usable_cores

_UNMET = "unmet"
"""The name of the world of a rank that meets no other."""
REJOIN_SECONDS = 120.0
"""The seconds that a supervisor has to slot a replacement."""
LOOK_SECONDS = 1.0
"""The seconds between two looks at whether a generation is over, where nothing wakes who waits for that."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    """The number of this process among all ranks, from 0."""
    size: int = 1
    """The number of ranks."""
    local_rank: int = 0
    """The number of this process among the ranks of its host, from 0."""
    local_size: int = 1
    """The number of ranks on this host."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """The device that this rank computes on."""
    place: MemberPlace | None = None
    """The place that this process has in the membership of the run, where workers may be replaced."""
    channel: Channel | None = field(default=None, repr=False, compare=False)
    """The channel to this host's supervisor, where there is one."""
    slot: int = 0
    """The line of this process in what the host's processes share, for as long as it lives; its rank may change."""
    slots: int = 1
    """The number of slots that there are."""
    members: Membership | None = field(default=None, repr=False, compare=False)
    """The membership of the run, where workers may be replaced."""
    insecure: bool = False
    """True: ranks on several hosts need no secret, and any process that reaches a port may take one's place."""
    outer: World | None = field(default=None, repr=False, compare=False)
    """The world that this is a part of, made by ``split``."""
    name: str = ""
    """The name of a part: its axis and its ranks in the outer world, as ``pipe/0,2``."""
    all_waits: WaitClock = field(default_factory=WaitClock, repr=False, compare=False)
    """The time that this process has spent waiting for others, over all groups."""
    _parts: dict[str, World] = field(default_factory=dict, repr=False, compare=False)
    _axes: dict[str, World] = field(default_factory=dict, repr=False, compare=False)
    _groups: dict[str, Group] = field(default_factory=dict, repr=False, compare=False)
    _memories: dict[str, memoryview] = field(default_factory=dict, repr=False, compare=False)
    _asked: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    _known_hosts: list[int] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_env(
        cls,
        *,
        device: str | None = None,
        channel: Channel | None = None,
        insecure: bool = False,
        meets: bool = True,
    ) -> World:
        """The world that torchrun, Slurm or a launcher describes in the environment; a world of one without it. Where
        the number of ranks of each host is not given, they meet here and find it out.

        ``device``: "cpu" or "cuda"; None takes the GPUs where there are any, shared
        in turn where there are fewer than ranks. ``insecure``: ranks on several hosts need no APPORTION_SECRET_FILE.
        ``meets=False``: each rank is a world by itself, which meets none: for strategies whose ranks come and go.
        Sets MASTER_ADDR and MASTER_PORT where they follow from what Slurm says: torch reads them too.
        """
        launched_ranks.refuse_unstarted(os.environ)
        given = launched_ranks.given(os.environ)
        size = number("WORLD_SIZE", given.get("WORLD_SIZE", "1"))
        missing = [name for name in NAMES if name not in given]
        if size > 1 and missing:
            raise ValueError(
                f"WORLD_SIZE={size} but {', '.join(missing)} is not set: start it with torchrun or srun, or set all of "
                f"{', '.join(NAMES)} (MASTER_ADDR: the host of rank 0, MASTER_PORT: a free port there)"
            )
        rank, local_rank = number("RANK", given.get("RANK", "0")), number("LOCAL_RANK", given.get("LOCAL_RANK", "0"))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} must be in 0..{size - 1} (WORLD_SIZE={size})")
        if size > 1:
            os.environ.update({name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT")})
        near = size == 1 or is_loopback(given["MASTER_ADDR"])
        given_size = given.get("LOCAL_WORLD_SIZE", str(size) if near else None)
        local_size = number("LOCAL_WORLD_SIZE", given_size) if given_size is not None else 0
        world = cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            device=launched_ranks.device(device, local_rank),
            channel=channel,
            slot=local_rank,
            slots=local_size,
            insecure=insecure,
        )
        if not meets and size > 1:
            return world._by_itself()
        return world if local_size else world._found_out()

    def _by_itself(self) -> World:
        whole = replace(self, local_size=max(1, self.local_size), slots=max(1, self.slots))
        return replace(whole, size=1, local_size=1, slot=0, slots=1, outer=whole, name=_UNMET)

    @property
    def unmet(self) -> World | None:
        """The world whose other ranks this one meets not: they come and go. None where all meet."""
        return self.outer if self.name == _UNMET else None

    def _found_out(self) -> World:
        """Meet the other ranks, and return this world with the number of ranks that this host has."""
        flat = self._meet()
        given_size = gather_messages([host_key(), self.local_rank], flat, device=self.device)
        local_size = launched_ranks.count_ranks([(key, local_rank) for key, local_rank in given_size], self.rank)
        found = replace(self, local_size=local_size, slots=local_size, _groups={}, _known_hosts=[])
        found._groups["world"] = found._fastest(flat)
        return found

    @property
    def generation(self) -> int:
        """The number of the membership, which grows with every change of it; what waits for an older one is
        informed."""
        return 0 if self.place is None else self.place.generation

    @property
    def under_way(self) -> bool:
        """True where the training had begun before this generation, so that there is a state to go on from."""
        return self.place is not None and self.place.generation > self.place.began

    @property
    def most(self) -> int:
        """The number of ranks of this world while none is lost."""
        return self.size if self.members is None or self.outer is not None else max(self.size, self.members.ranks)

    @property
    def meeting(self) -> tuple[str, int] | None:
        """The address and the port where the ranks of several supervised hosts meet; None: there are none."""
        return None if self.place is None else self.place.meeting

    def join(self) -> World:
        """Take this process's slot among workers that may be replaced, and return the world as it is when it may
        begin."""
        assert self.channel is not None
        members = Membership(self.shared("members", Membership.nbytes(self.slots)), self.slots, self.size)
        members.occupy(self.slot)
        return replace(self, members=members).rejoin()

    def rejoin(self) -> World:
        """Take this process's place in the world as it has become, after MembershipChanged. Called once nothing of this
        process writes any more to what the world shares; leaves the groups."""
        if self.members is None:
            raise ValueError("rejoin() needs a supervisor that replaces workers: start the run with local()")
        if self.outer is not None:
            raise ValueError(f"{self.name} is a part of a world: rejoin() that, and split it again")
        self.close()
        place = self.members.rejoin(self.slot, REJOIN_SECONDS)
        world = replace(
            self,
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            place=place,
            all_waits=WaitClock(),
            _parts={},
            _axes={},
            _groups={},
            _known_hosts=[],
            _asked={},  # a rank that had not built its step yet builds it anew, in the memory that the others have
        )
        if world.meeting is not None:
            threading.Thread(target=world._abandon_when_over, name="membership", daemon=True).start()
        return world

    def _abandon_when_over(self) -> None:
        """Ends the waits of this process for ranks of other hosts, once another generation has begun."""
        assert self.members is not None
        while not self.members.await_change(self.generation, LOOK_SECONDS):
            pass
        self.abandon()

    def tell_torn(self) -> None:
        """Tell the supervisor of several hosts that a connection to another host was lost."""
        if self.meeting is not None and self.channel is not None:
            with suppress(OSError):  # it is gone, and this process ends with it
                self.channel.send({"kind": "torn", "generation": self.generation})

    def is_over(self, seconds: float) -> bool:
        """Wait at most this many seconds until this generation is over, and return whether it is. Where a connection to
        another host was lost, the supervisor of the hosts learns why, and says how the run goes on."""
        return (
            self.meeting is not None
            and self.members is not None
            and self.members.await_change(self.generation, seconds)
        )

    def check(self) -> None:
        """Raise MembershipChanged where another generation has begun, and PeerLost where this world was abandoned.
        Costs nothing."""
        if self.members is not None:
            self.members.check(self.generation)
        if self.all_waits.abandoned:
            raise PeerLost(f"rank {self.rank} waits no longer for the others: what they did together was ended")

    @collective
    def split(self, axis: str, ranks: Sequence[Sequence[int]]) -> World:
        """The part of this world that this rank belongs to, as a world of its own: its rank there is its place in its
        list, its memory and its groups are those of its ranks alone, ``local_size`` counts those of them on this host.
        Called by all ranks, with the same lists, which hold every rank once; the same again gives the same part.
        ``group(axis)`` is its group from then on.
        """
        if axis == "world" or "/" in axis or not axis:
            raise ValueError(f'axis={axis!r} must be a name without "/", and not "world", which is all ranks')
        if sorted(rank for part in ranks for rank in part) != list(range(self.size)):
            raise ValueError(f"ranks={[list(part) for part in ranks]} must hold each of {self.size} ranks once")
        own = next(list(part) for part in ranks if self.rank in part)
        name = f"{axis}/{','.join(map(str, own))}"
        if name not in self._parts:
            self._parts[name] = self._part(name, own)
        self._axes[axis] = self._parts[name]
        return self._parts[name]

    def _part(self, name: str, ranks: list[int]) -> World:
        rank, size, hosts = ranks.index(self.rank), len(ranks), self.hosts()
        here = [other for other in ranks if hosts[other] == hosts[self.rank]]
        part = replace(
            self,
            rank=rank,
            size=size,
            local_rank=here.index(self.rank),
            local_size=len(here),
            slot=here.index(self.rank),
            slots=len(here),
            outer=self,
            name=name,
            _parts={},
            _axes={},
            _groups={},
            _memories={},
            _asked={},
            _known_hosts=[hosts[other] for other in ranks],
        )
        if not self._is_supervised_memory():  # made together: the order is the same on all ranks
            self.group()  # a rank that is in a part by itself meets the others here all the same
            if size > 1:
                part._groups["world"] = self._connect_part(part, ranks)
        return part

    @collective
    def hosts(self) -> list[int]:
        """The number of every rank's host, by rank; they are numbered as they come. Called by all ranks."""
        if self.local_size == self.size:
            return [0] * self.size
        group = self.group()  # which may find it out as it connects
        if not self._known_hosts:
            self._find_hosts(group)
        return self._known_hosts

    def _find_hosts(self, group: Group) -> None:
        """Learn where the other ranks run. Raises ValueError where the numbers that they were given cannot be."""
        slots = gather_messages([host_key(), self.local_rank, self.local_size], group, device=self.device)
        launched_ranks.refuse_contradictions(slots)
        self._known_hosts.extend(launched_ranks.hosts(slots))

    def _connect_part(self, part: World, ranks: list[int]) -> Group:
        whole = self.group()
        flat: Any = getattr(whole, "flat", whole)
        return part._fastest(flat.part(ranks))

    @collective
    def renew(self) -> World:
        """The same world with groups, memory and parts of its own, over connections of their own: what happens in it,
        an error among it, leaves this one as it is. Called by all ranks, where no supervisor has started them."""
        group: Any = self.group()
        flat = (getattr(group, "flat", None) or group).part(range(self.size))
        fresh = replace(
            self, all_waits=WaitClock(), _parts={}, _axes={}, _groups={"world": flat}, _memories={}, _asked={},
            _known_hosts=list(self._known_hosts),
        )  # fmt: skip
        flat.all_waits = fresh.all_waits
        fresh._groups["world"] = fresh._fastest(flat)
        return fresh

    def abandon(self) -> None:
        """Have those that wait in a group of this world, or of its parts, stop waiting, with PeerLost. May be called
        from any thread, for a world that ``renew`` has made; only ``close`` comes after it."""
        self.all_waits.abandoned = True
        for group in list(self._groups.values()):
            flat: Any = getattr(group, "flat", None) or group
            flat.abandon()

    def group(self, axis: str = "world") -> Group:
        """The collectives among the ranks of this world, or of this rank's part along an axis that ``split`` has made;
        connected on first use, by all of them."""
        if axis in self._axes:
            return self._axes[axis].group()
        if axis != "world":
            known = ", ".join(map(repr, ("world", *self._axes)))
            raise ValueError(f"axis={axis!r} is unknown: this world has {known}; split() makes others")
        if axis not in self._groups:
            self._groups[axis] = self._connect()
            if self.all_waits.abandoned:  # meanwhile
                self.abandon()
        return self._groups[axis]

    def _is_supervised_memory(self) -> bool:
        return self.device.type == "cpu" and self.channel is not None and self.local_size == self.size

    def _connect(self) -> Group:
        if self.size == 1:
            alone = Alone()
            alone.all_waits = self.all_waits
            return alone
        if self._is_supervised_memory():
            name = self.another("group") if self.outer is not None else "group/world"
            return SharedMemoryGroup(
                self.shared(name, nbytes(self.slots)),
                self.rank,
                self.size,
                generation=self.generation,
                check=self.check,
                spins=self.has_cores(),
                all_waits=self.all_waits,
                links=lambda source, to: self.shared(f"{name}/{source}-{to}", p2p.nbytes),
            )
        return self._fastest(self._meet())

    def _meet(self) -> Group:
        """Meet the other ranks: over connections of our own, or those of torch for GPUs and where the user's own script
        has made them."""
        if self.meeting is not None:
            return self._meet_again()
        if self.device.type == "cpu" and not _has_torch_group():
            from apportion.comm.network.network_group import NetworkGroup
            from apportion.comm.network.rendezvous import meet

            one_host = self.local_size == self.size or is_loopback(os.environ["MASTER_ADDR"])
            meeting = meet(self.rank, self.size, one_host=one_host, insecure=self.insecure)
            return NetworkGroup(meeting, range(self.size), all_waits=self.all_waits)
        # torch.distributed takes long to import and a world of one does not need it.
        from apportion.comm.process_group import ProcessGroup

        group = ProcessGroup.connect(
            rank=self.rank,
            size=self.size,
            device=self.device,
            local_size=self.local_size,
            watched=self.channel is not None,
        )
        group.all_waits = self.all_waits
        return group

    def _meet_again(self) -> Group:
        """Meet the other ranks of this generation, on several hosts that are supervised."""
        from apportion.comm.network.network_group import NetworkGroup
        from apportion.comm.network.rendezvous import meet_again

        assert self.meeting is not None
        address, port = self.meeting
        met = meet_again(
            self.rank, self.size, Address(address, port), self.generation,
            called_off=lambda: self.all_waits.abandoned,
        )  # fmt: skip
        return NetworkGroup(met, range(self.size), all_waits=self.all_waits)

    def _fastest(self, group: Group) -> Group:
        """Return the group, or one of the same ranks that uses memory where they share some and no supervisor hands it
        out."""
        if self.device.type != "cpu" or (self.channel is not None and self.meeting is None):
            return group
        if self.local_size == self.size:
            found = host_memory(group, spins=self.has_cores())
            if found is None:
                return group
            found.flat = group
            return found
        if not self._known_hosts:
            self._find_hosts(group)
        from apportion.comm.network.network_group import NetworkGroup

        if len(set(self._known_hosts)) == self.size or not isinstance(group, NetworkGroup):
            return group
        from apportion.comm.network.hierarchical_group import HierarchicalGroup

        return HierarchicalGroup.make(group, self._known_hosts, spins=self.has_cores())

    def has_cores(self) -> bool:
        """Has every process of this host a core of its own, so that it may look for the others without sleeping?"""
        if self.outer is not None:
            return self.outer.has_cores()
        return self.local_size * torch.get_num_threads() <= usable_cores()

    def shared(self, name: str, nbytes: int) -> memoryview:
        """Memory that every rank of this host sees. Zeroed when first asked for; the same name gives the same memory.
        The supervisor owns it, and it outlives any rank; without a supervisor all ranks ask for it together."""
        if self.channel is not None:
            return self._named(name, nbytes)
        if name not in self._memories:
            memory = shared_memory(self.group(), nbytes) if self.local_size == self.size else None
            if memory is None:
                raise ApportionError(f"shared({name!r}): the ranks do not share memory; local() starts ranks that do")
            self._memories[name] = memory
        return self._memories[name]

    def _named(self, name: str, nbytes: int) -> memoryview:
        if self.outer is not None:
            return self.outer._named(f"{self.name}/{name}", nbytes)
        assert self.channel is not None
        return self.channel.shared(name, nbytes)

    def another(self, name: str) -> str:
        """The name with how often it was asked for here: what is built again does not find what it left behind."""
        self._asked[name] = self._asked.get(name, -1) + 1
        return f"{name}/{self._asked[name]}"

    def close(self) -> None:
        """Leave the groups, and those of the parts."""
        for part in self._parts.values():
            part.close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def _has_torch_group() -> bool:
    """Tells whether the user's own script has made a group of torch.distributed."""
    module: Any = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return False
    from apportion.comm.network.c10d_backend import is_ours

    return not is_ours()
