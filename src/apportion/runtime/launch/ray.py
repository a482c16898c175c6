"""ray: an agent on each of several nodes of a running Ray cluster starts that node's ranks.

::

    driver    frames  ->  calls of an actor, 32 KiB at most each  ->  actor on the node  ->  stdin of the agent
              frames  <-  what those that wait there return       <-                     <-  stdout and stderr

An actor holds one agent as a process of its own, since a threaded actor must not fork. What the agent is sent and sends
travels as arguments and results of the actor's calls, so small that Ray sends them from process to process: nothing
comes into its object store, and nothing of a run into a runtime environment. Where the driver ends, Ray ends its
actors, and with an actor the input of its agent ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, final

from apportion.errors import ApportionError
from apportion.runtime.agents.agent_command import HOST_CORES, REACHED_FROM, agent_command
from apportion.runtime.agents.hosts_launcher import HostsLauncher, RunHost

PLACE_SECONDS = 20.0
"""The seconds in which Ray has to find the cores that a run asks for."""
PIECE_BYTES = 1 << 15
"""The most bytes of one stream in a call or its result: Ray puts what is larger than 100 kB into its object store."""
POLL_SECONDS = 10.0
"""The seconds that a call waits for what the agent prints."""
LOST = 255
"""The exit status of a connection that Ray has lost."""
_JOIN_SECONDS = 2.0
_SAYS = "ray: "
"""What the line begins with that says why an actor was lost."""
_REFUSED = re.compile(r"InvalidAuthToken|[Uu]nauthenticated|[Aa]uthentication (token|is)|auth token")
"""What Ray says where a token is missing, or is another one."""


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Ray(HostsLauncher):
    """Worker processes on nodes of a running Ray cluster: ``ray(nodes=2, workers=4)``. ``workers=None``: all cores of
    each node, or all GPUs."""

    nodes: int | None = None
    """The number of nodes; None: all that have cores."""
    address: str = "auto"
    """The address of the cluster, as ``ray.init`` takes it; "auto": RAY_ADDRESS, or the cluster that this machine is
    in."""

    own_words: ClassVar[tuple[str, ...]] = (_SAYS,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must_be_whole("nodes")

    def parsed(self) -> list[RunHost]:
        """Returns the nodes on which Ray has reserved the cores of the run, the driver's own first. Raises
        ApportionError where no cluster is found, or not enough cores are free."""
        cluster = _Cluster(_imported(), self.address)
        try:
            return list(cluster.placed(self._bundles(cluster.nodes()), self.workers))
        except BaseException:
            cluster.release()
            raise

    def _bundles(self, nodes: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        """Returns what the run needs on each of its nodes. ``nodes``: what each node has. Raises ApportionError where
        the cluster has fewer nodes."""
        wanted = self.nodes if self.nodes is not None else len(nodes)
        if wanted > len(nodes) or not nodes:
            raise ApportionError(
                f"the Ray cluster has {len(nodes)} nodes with cores, and nodes={wanted} are wanted: start more, or ask "
                "for fewer"
            )
        largest = sorted(nodes, key=lambda node: -node["CPU"])[:wanted]
        gpus = self.device != "cpu" and all(node.get("GPU", 0) >= 1 for node in largest)
        return [self._bundle(node, gpus=gpus) for node in largest]

    def _bundle(self, node: Mapping[str, float], *, gpus: bool) -> dict[str, float]:
        cores = node["CPU"] if self.workers is None else self.workers * ((self.threads or 1) + self.loaders)
        found: dict[str, float] = {"CPU": int(cores)}
        if gpus:
            found["GPU"] = int(node["GPU"] if self.workers is None else min(self.workers, node["GPU"]))
        return found

    def start(self, host: RunHost) -> _CarriedAgent:
        """Has an actor on a node start the agent there."""
        assert isinstance(host, _RayHost)
        return host.cluster.start(host, agent_command(self.python))

    def why_lost(self, host: str, status: int | None, said: Sequence[str], *, is_up: bool) -> str | None:
        """Returns why Ray has lost the actor that held the agent; None where the agent itself has ended."""
        if status != LOST:
            return None
        last = said[-1].removeprefix(_SAYS) if said else "it does not say why"
        if is_up:
            return f"host {host}: Ray has lost the actor that held its agent ({last}); resume=True goes on"
        return f"host {host}: Ray could not start the actor that holds its agent ({last})"

    def release(self, hosts: Sequence[RunHost]) -> None:
        """Gives the cores back to Ray, and leaves the cluster where this run has joined it."""
        for host in hosts:
            if isinstance(host, _RayHost):
                host.cluster.release()


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ApportionError(
            f"ray() needs Ray in this environment ({error}): pip install ray, at the cluster's version"
        ) from error
    return ray


@dataclass(frozen=True)
class _RayHost(RunHost):
    """A node on which Ray has reserved the cores of a run."""

    cluster: _Cluster = field(repr=False, compare=False)
    bundle: int
    """The number of what was reserved there."""
    cores: int


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Puts the handler of SIGTERM back, in the place of which Ray has one that ends the process: it is the notice to
    end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@final
class _Cluster:
    """A Ray cluster, and what a run has of it. Joins it where this process is not in it yet."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray, self._joined = ray, not ray.is_initialized()
        self._group: Any = None
        if self._joined:
            heard: list[str] = []
            try:
                with _hearing(heard), _sigterm_kept():
                    ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="apportion")
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise ApportionError(why_not_joined(address, error, heard)) from error

    def nodes(self) -> list[dict[str, float]]:
        """Returns what each node has that is there and has cores."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0)]

    def placed(self, bundles: Sequence[dict[str, float]], workers: int | None) -> Iterator[_RayHost]:
        """Reserves what a run needs, each part on another node, and yields the nodes. Raises ApportionError where that
        is not free."""
        from ray.util.placement_group import placement_group, placement_group_table

        self._group = placement_group(list(bundles), strategy="STRICT_SPREAD", name="apportion")
        if not self._group.wait(PLACE_SECONDS):
            raise ApportionError(
                f"Ray has not found {_described(bundles)} on {len(bundles)} nodes for {PLACE_SECONDS:.0f} s: free are "
                f"{_described([self._ray.available_resources()])} on all nodes together; end what has the others, or "
                "ask for fewer with nodes= or workers="
            )
        about = {node["NodeID"]: node for node in self._ray.nodes()}
        table = placement_group_table(self._group)["bundles_to_node_id"]
        own = self._ray.get_runtime_context().get_node_id()
        order = sorted(table, key=lambda bundle: (table[bundle] != own, bundle))
        names = [about[table[bundle]]["NodeManagerHostname"] for bundle in order]
        for bundle, name in zip(order, names, strict=True):
            called = name if names.count(name) == 1 else about[table[bundle]]["NodeManagerAddress"]
            yield _RayHost(called, workers, self, int(bundle), int(bundles[int(bundle)]["CPU"]))

    def start(self, host: _RayHost, command: list[str]) -> _CarriedAgent:
        """Starts an actor on a node, which starts a command there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        there, _, _ = ray.get_runtime_context().gcs_address.rpartition(":")
        environment = {REACHED_FROM: there.strip("[]"), HOST_CORES: str(host.cores)}
        own = sys.modules[__name__]
        ray.cloudpickle.register_pickle_by_value(own)  # Ray's workers need not have this package
        try:
            actor = ray.remote(_Carrier).options(
                num_cpus=host.cores,
                num_gpus=self._group.bundle_specs[host.bundle].get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, host.bundle),
                max_concurrency=4,
                max_restarts=0,
                max_task_retries=0,
            )
            return _CarriedAgent(ray, actor.remote(command, environment))
        finally:
            ray.cloudpickle.unregister_pickle_by_value(own)

    def release(self) -> None:
        """Gives back what the run has, once."""
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):  # the cluster is gone
                self._ray.util.remove_placement_group(group)
        if self._joined:
            self._joined = False
            self._ray.shutdown()


class _Carrier:
    """The actor on a node: it holds an agent as its own child, and carries what that reads and writes. Ray's workers
    need not have this package, so that this class uses nothing of it."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._said = [b"", b""]
        self._open = 2
        for number, file in enumerate((self._process.stdout, self._process.stderr)):
            threading.Thread(target=self._hear, args=(number, file), daemon=True).start()

    def _hear(self, number: int, file: IO[bytes]) -> None:
        while data := os.read(file.fileno(), PIECE_BYTES):
            with self._changed:
                self._changed.wait_for(lambda: not self._said[number])
                self._said[number] = data
                self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def read(self, seconds: float) -> tuple[bytes, bytes, int | None]:
        """Waits until the agent has written something or has ended, and returns what it has written to its output and
        its error output, and its exit status; None while it runs."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._said) or not self._open, seconds)
            out, err = self._said
            self._said = [b"", b""]
            self._changed.notify_all()
            ended = not self._open and not out and not err
        if not ended:
            return out, err, None
        status = self._process.wait()
        return b"", b"", status if status >= 0 else 128 - status

    def write(self, data: bytes) -> None:
        """Gives the agent something to read. Raises OSError where it has ended."""
        assert self._process.stdin is not None
        left = memoryview(data)
        while left:
            left = left[os.write(self._process.stdin.fileno(), left) :]

    def end(self) -> None:
        """Ends what the agent reads, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()


@final
class _CarriedAgent:
    """An agent that an actor holds, as a process of this machine: three files, and an exit status."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._status: int | None = None
        self._ended = threading.Event()
        given, taken = os.pipe(), [os.pipe(), os.pipe()]
        self.stdin: IO[bytes] = open(given[1], "wb")  # noqa: SIM115 (closed by the caller)
        self.stdout, self.stderr = (open(read, "rb") for read, _ in taken)  # noqa: SIM115 (the same)
        self._threads = [
            threading.Thread(target=self._give, args=(given[0],), daemon=True),
            threading.Thread(target=self._take, args=tuple(write for _, write in taken), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _give(self, source: int) -> None:
        """Passes on what is to be read by the agent."""
        try:
            while data := os.read(source, PIECE_BYTES):
                self._ray.get(self._actor.write.remote(data))
            self._ray.get(self._actor.end.remote())
        except Exception:  # the agent or the actor is gone, and the other thread says so
            pass
        finally:
            os.close(source)

    def _take(self, out: int, err: int) -> None:
        """Passes on what the agent writes, until it has ended."""
        try:
            status = None
            while status is None:
                *sent, status = self._ray.get(self._actor.read.remote(POLL_SECONDS))
                for descriptor, data in zip((out, err), sent, strict=True):
                    _write_all(descriptor, data)
            self._status = status
        except Exception as error:
            self._status = LOST
            with contextlib.suppress(OSError):
                _write_all(err, f"{_SAYS}{why_lost_actor(error)}\n".encode())
        finally:
            self._give_back()
            os.close(out)
            os.close(err)
            self._ended.set()

    def poll(self) -> int | None:
        """Returns the exit status of the agent's shell, or LOST; None while it runs."""
        return self._status if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the agent has ended. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the agent", timeout or 0.0)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        """Ends the actor, and the agent with it."""
        self._give_back()
        self._threads[1].join(_JOIN_SECONDS)

    def _give_back(self) -> None:
        """Ends the actor: another one, with another agent, needs the cores that it has."""
        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            self._ray.kill(self._actor)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def _hearing(lines: list[str]) -> Iterator[None]:
    """Keeps what is printed to standard error meanwhile: why a cluster does not let a process in, Ray says there alone,
    again and again."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            kept.seek(0)
            lines += kept.read().decode(errors="replace").splitlines()


def why_not_joined(address: str, error: BaseException, heard: Sequence[str]) -> str:
    """Returns why a cluster cannot be joined, with the cure. ``heard``: what Ray has printed meanwhile."""
    said = " ".join(str(error).split()).removesuffix(".")
    refused = [text for text in (*heard, said) if _REFUSED.search(text)]
    if refused:
        why = refused[-1].rpartition("RPC error: ")[2]
        return (
            f"the Ray cluster at address={address!r} does not let this process in ({why}): set RAY_AUTH_MODE=token, "
            "and RAY_AUTH_TOKEN_PATH to a file with the cluster's token, which ~/.ray/auth_token may hold as well"
        )
    if isinstance(error, ConnectionError):
        return (
            f"no Ray cluster is found at address={address!r} ({said}): run this on a node of one (ray start --head on "
            "the first, ray start --address=FIRST:6379 on the others), or set RAY_ADDRESS"
        )
    return f"the Ray cluster at address={address!r} cannot be joined: {said}"


def why_lost_actor(error: BaseException) -> str:
    """Returns the reason that Ray gives for an actor's end, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "reason" in line.lower() or "error" in line.lower()]
    last = (reasons or lines or [type(error).__name__])[-1]
    return last.partition(" Some common causes")[0].removesuffix(".")  # of all ends alike


def _described(resources: Sequence[Mapping[str, float]]) -> str:
    names = [name for name in ("CPU", "GPU") if any(each.get(name, 0) for each in resources)]
    each = sorted({", ".join(f"{each.get(name, 0):g} {name}" for name in names) for each in resources})
    return " and ".join(each) or "no CPU"
