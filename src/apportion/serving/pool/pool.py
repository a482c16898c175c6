"""The pool of the members' processes: it starts them, keeps a spare one ready that has every model loaded, and replaces
those that die.

::

    start        each member's process loads its net and times it
    keep_spare   then the spare loads them all
    one dies     the spare becomes it (its socket answers at once);  another spare is started
    two die      the second waits for the new spare
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from apportion.errors import ApportionError
from apportion.process import is_stopped
from apportion.serving.pool.frames import Arena, Frame, Kind
from apportion.serving.pool.member import Member
from apportion.serving.pool.worker_handle import WorkerHandle

LEAST_LIFE = 1.0
"""The lifetime in seconds below which a process that dies makes its member wait for the next one, twice as long each
time, up to ``LONGEST_WAIT``."""
LONGEST_WAIT = 5.0
"""The longest time in seconds that a member waits for its next process."""
BECOME_SECONDS = 1.0
"""The seconds in which a spare has to become a member whose model it has loaded; then it is given up, and a new process
started."""
END_SECONDS = 0.5
"""The seconds in which processes have to end by themselves when the server does; then they are killed."""
STOPPED_SECONDS = 2.0
"""The seconds after which a process that is stopped, by a signal or a debugger, is given up while it loads its models
or waits as the spare; where it serves a member, it is noticed when it does not answer."""
PROGRESS_SECONDS = 5.0
"""The seconds between two lines about a process that still loads or times its models."""
LOOK_SECONDS = 0.05
"""The seconds between two looks for what has expired or hangs."""
STALLED_SECONDS = 0.5
"""The seconds between two looks beyond which the server itself stood still: then no member is checked, and none counts
as hung."""

Log = Callable[..., None]
AnswerFuture = asyncio.Future[dict[str, Any]]


class MemberPool:
    """The processes of all members. ``load_seconds``: the time for a process to start and load its models.
    ``timing_seconds``: the part of that for timing them."""

    def __init__(
        self,
        members: Sequence[Member],
        log: Log,
        *,
        inbox: Arena,
        outbox_bytes: int,
        load_seconds: float,
        timing_seconds: float,
    ) -> None:
        self._members, self._log = members, log
        self._inbox, self._outbox_bytes = inbox, outbox_bytes
        self._load, self._timing = load_seconds, timing_seconds
        self._spare: WorkerHandle | None = None
        self._spare_has: frozenset[str] = frozenset()
        """The names of the members whose models the spare has loaded."""
        self._dead: list[WorkerHandle] = []
        self._born: dict[Member, float] = {}
        self._waits: dict[Member, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare_stopped = 0.0
        """The number of seconds for which the spare has been stopped."""
        self._over = False

    async def start(self) -> None:
        """Start the processes of all members, which load one after the other so that each is timed alone. Raises
        ApportionError with what the process says where a model cannot be loaded."""
        for member in self._members:
            answer = await self._assign_process(member)
            if answer["what"] == "refused":
                raise ApportionError(f"member {member.name} ({member.source.path}): {answer['why']}")
        self._spawn(self._watch())

    def keep_spare(self) -> None:
        """Keep a spare process ready from now on."""
        self._spawn(self._keep_spare())

    def process_died(self, member: Member, child: WorkerHandle) -> None:
        """Replace the process of this member, which has died."""
        child.kill()  # its socket has ended; this makes sure that the process has as well
        self._dead.append(child)
        now = asyncio.get_running_loop().time()
        # A process that dies right after its start will probably die again: its member waits twice as long each time,
        # and the machine is not kept busy with starting processes.
        young = now - self._born.get(member, now) < LEAST_LIFE
        self._waits[member] = min(LONGEST_WAIT, 2 * (self._waits.get(member) or 0.125)) if young else 0.0
        self._log("member died", level="warning", member=member.name, restarts=member.restarts)
        self._spawn(self._replace(member, self._waits[member]))

    async def close(self) -> None:
        """End all processes; none is left afterwards."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # a process that was being started is in _dead then
        children = [member.process for member in self._members if member.process is not None]
        children += [self._spare] if self._spare is not None else []
        for member in self._members:
            member.close()
        if self._spare is not None:
            self._spare.close()
        every = [*children, *self._dead]
        if not all(await asyncio.gather(*(child.ended(END_SECONDS) for child in every))):
            for child in every:
                child.process.kill()
            for child in every:
                child.process.wait()

    # One process

    async def _assign_process(self, member: Member, child: WorkerHandle | None = None) -> dict[str, Any]:
        """Give the member a process: this one, which has its model loaded, or a new one. Returns what the process
        answers."""
        process = child or self._new_process(member.source.threads)
        # The first process of a member was timed alone, when the server started. A later one starts beside others that
        # compute, where timing would measure their load; it inherits what is known.
        known = bool(member.batcher.times.pace.seconds)
        try:
            answer = await self._ask(
                process,
                "become",
                self._load if child is None else BECOME_SECONDS,
                source=member.source.to_json(),
                seconds=0.0 if known else self._timing,
                most_rows=member.batcher.most_rows,
                batched=member.batcher.batched if known else None,
            )
        except BaseException:
            process.kill()
            self._dead.append(process)
            raise
        if answer["what"] == "refused":
            process.close()
            self._dead.append(process)
            member.refusal, member.state = answer["why"], "down"
            return answer
        member.refusal = None
        now = asyncio.get_running_loop().time()
        self._born[member] = now
        member.breaker = member.breaker.fresh(now)
        member.process_started(process, answer)
        self._log(
            f"member {member.name} pid {process.pid}", member=member.name, pid=process.pid, runtime=member.runtime
        )
        return answer

    def _new_process(self, threads: int) -> WorkerHandle:
        return WorkerHandle(self._inbox, self._outbox_bytes, lambda frame: None, lambda: None, threads=threads)

    async def _ask(self, child: WorkerHandle, what: str, seconds: float, /, **how: Any) -> dict[str, Any]:
        """Return what the process answers to a message. Raises ApportionError where it dies over it, or takes too
        long."""
        future: AnswerFuture = asyncio.get_running_loop().create_future()

        def heard(frame: Frame) -> None:
            if frame.kind == Kind.CONTROL and not future.done():
                future.set_result(json.loads(frame.text))

        def gone() -> None:
            if not future.done():
                future.set_exception(ApportionError(f"process {child.pid} died while it was to {what}"))

        child.heard, child.gone = heard, gone
        child.send_control(what, **how)
        answer = await self._await_answer(future, child.pid, what, seconds)
        if child.over:  # it died after it had answered
            raise ApportionError(f"process {child.pid} died after it was to {what}")
        return answer

    async def _await_answer(self, future: AnswerFuture, pid: int, what: str, seconds: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        began = now = logged = loop.time()
        stopped = 0.0
        while not future.done():
            if now >= began + seconds:
                raise ApportionError(f"process {pid} took more than {seconds:g} s to {what}")
            if stopped >= STOPPED_SECONDS:
                why = f"has been stopped (SIGSTOP, or a debugger) for {stopped:.0f} s"
                raise ApportionError(f"process {pid} {why} while it was to {what}")
            if now >= logged + PROGRESS_SECONDS:
                logged = now
                doing = "loads or times its net" if what == "become" else "loads the nets"
                self._log("still starting", pid=pid, why=f"it {doing}, for {now - began:.0f} s so far")
            await asyncio.wait({future}, timeout=min(LOOK_SECONDS, began + seconds - now))
            last, now = now, loop.time()
            # A pause of this process itself must not count as one of the child, so that a single step adds at most
            # STALLED_SECONDS.
            stopped = stopped + min(now - last, STALLED_SECONDS) if is_stopped(pid) else 0.0
        return future.result()

    # The spare

    async def _keep_spare(self, wait: float = 0.0) -> None:
        """Start spares until one is ready, with as many models as can be loaded."""
        await asyncio.sleep(wait)
        sources = [member.source.to_json() for member in self._members]
        while not self._over and self._spare is None:
            spare = None
            try:
                spare = self._spare = self._new_process(max(member.source.threads for member in self._members))
                answer = await self._ask(spare, "prepare", self._load, sources=sources)
                for name, why in answer["refused"].items():
                    self._log("no spare", level="warning", member=name, why=why)
                has = frozenset(member.name for member in self._members) - {*answer["refused"]}
                if not has:
                    raise ApportionError("it could load no net")
            except (ApportionError, OSError) as error:
                self._log("no spare", level="warning", why=str(error))
                if spare is not None:
                    spare.kill()
                    self._dead.append(spare)
                self._spare = None
                await asyncio.sleep(LEAST_LIFE)
                continue
            spare.gone = self._spare_gone
            self._spare_has = has
            self._log("spare ready", pid=spare.pid)

    def _look_at_spare(self, passed: float) -> None:
        spare = self._spare
        ready = spare is not None and bool(self._spare_has)
        self._spare_stopped = self._spare_stopped + passed if ready and spare and is_stopped(spare.pid) else 0.0
        if spare is not None and self._spare_stopped >= STOPPED_SECONDS:
            why = f"process {spare.pid} has been stopped (SIGSTOP, or a debugger) for {self._spare_stopped:.0f} s"
            self._log("no spare", level="warning", why=why)
            self._spare_stopped = 0.0
            spare.kill()  # ``gone`` is called as soon as its socket ends

    def _spare_gone(self) -> None:
        assert self._spare is not None
        self._dead.append(self._spare)
        self._spare, self._spare_has = None, frozenset()
        self._spawn(self._keep_spare(LEAST_LIFE))

    async def _replace(self, member: Member, wait: float) -> None:
        await asyncio.sleep(wait)
        while not self._over and member.state != "up":
            child = None
            if member.name in self._spare_has:
                child, self._spare, self._spare_has = self._spare, None, frozenset()
            try:
                await self._assign_process(member, child)
            except (ApportionError, OSError) as error:
                level = "warning" if child else "error"  # a spare that is dead too: a new process is next, at once
                self._log("member not replaced", level=level, member=member.name, why=str(error))
                if child is None:
                    await asyncio.sleep(LEAST_LIFE)
            finally:
                if child is not None:
                    self._spawn(self._keep_spare())
            if member.refusal is not None:
                self._log("member not replaced", level="error", member=member.name, why=member.refusal)
                await asyncio.sleep(LONGEST_WAIT)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while True:
            last = now
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            if now - last > STALLED_SECONDS:
                continue  # it was this program that stood still: what members have sent has not been read yet
            self._look_at_spare(now - last)
            for member in self._members:
                try:
                    member.check(now)
                except Exception as error:  # the other members are checked all the same
                    self._log("defect", level="error", member=member.name, why=repr(error))
            self._dead = [child for child in self._dead if child.process.poll() is None]

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log("defect", level="error", why=repr(error))
