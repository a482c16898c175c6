"""Strategies between hosts against torch's DDP: hosts as network namespaces, joined by cables of a rate. Needs root.

    python benchmarks/rows/several_hosts.py --json FILE [--only id,...]

hosts_ddp_HxR_RATE    data_parallel against DDP over gloo at its best setting (peers/ddp.py), H hosts of R ranks each,
                      global batch 128, the network 784-1024-1024-10 with its batches in memory: examples/s.
hosts_fp16_2x1_RATE   data_parallel(compress="fp16") against DDP with its fp16 hook, and, as hosts_fp16_2x1_RATE_plain,
                      against DDP without it.
hosts_int8_2x1_100m, hosts_power_sgd_2x1_100m
                      data_parallel with these compressions against DDP without one.
hosts_target_25m      the CIFAR-10 network to an accuracy of 0.60 on two hosts of one rank at 25 Mb/s, by the best of
                      some compressions and local_sgd, against DDP: the steps to the score counted without a cable
                      (seeds 0, 1, 2, the median; DDP's are data_parallel's, which makes the same updates), times the
                      seconds a step, measured in turn. Who cannot be the best any more is not counted to the end.
                      Needs CIFAR-10.
hosts_startup         seconds from the command to the first finished step of the digits on two hosts of one rank, under
                      torchrun: `apportion train --launcher env`, whose proof is remembered, against the same in DDP.
hosts_open_rounds     local_sgd with a deadline on MNIST over four hosts, two of which come and go every 20 s (one
                      process killed, and started again after 6 s; one frozen for as long), against the same number of
                      rounds on the two steady hosts: the loss on the test set. The JSON has the longest round, and how
                      many of those that returned were in the next round. Needs MNIST.
bytes_HxR             what a host sends in a step of data_parallel, over what a ring of hosts must send of the gradient
                      (W for two hosts, 4/3 W for three, 1.5 W for four), at 1 Gb/s: the cable's own count, headers and
                      all.
bytes_local_sgd_HxR   the same of a round of local_sgd, over one sum of the weights; `overlap`: beside the next round.
bytes_fully_sharded_HxR  the same of a step of fully_sharded, over 1.5 W: two gatherings of the weights and one sum of
                      the gradient, each half of W for two hosts.
server_rpc_RATE       push of a gradient of 100 MiB to a parameter server on another host and pull of the new weights,
                      against torch.distributed.rpc by the better of its channels for TCP (peers/store_rpc.py): MB/s,
                      both ways counted; with a rate, also as a share of the cable's.
hosts_straggler       seconds until MNIST's test accuracy is 0.97 on three hosts, of which one is four times slower:
                      parameter_server(servers=1), whose server is beside the worker of the third host, against
                      data_parallel, which waits for the slowest; Adagrad, batch 32 (mnist.py), at 1 Gb/s.
downpour_mnist_hosts  the same with parameter_server(servers=2, copies=1), whose servers are beside the workers of the
                      slow host and of the third. It is the worker that is slow: see mnist.py.

Every rank has one thread; the hosts share two cores in turn. Both sides of a row are warmed up and then run in turn,
A B A B, the other one parked on a pipe. Figures are medians over the rounds; a ratio above 1 is better than the peer.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from first_step import FOLDER
from hosts import cannot, several_hosts
from open_rounds import ComingAndGoing
from parked import DEADLINE, Side, SideFailed, environment
from table import main, measured

from apportion.core.value import parse

BENCHMARKS = Path(__file__).resolve().parents[1]
MLP = f"{BENCHMARKS / 'networks/mlp1024.py'}:workload"
PARAMETERS = 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10
OURS, DDP = str(BENCHMARKS / "sides/ours.py"), str(BENCHMARKS / "peers" / "ddp.py")
CIFAR = f"{BENCHMARKS.parent / 'examples' / 'cifar10.py'}:workload"
TWIN = f"{BENCHMARKS / 'networks/digits_first_step.py'}:workload"
TRAIN = ["--no-python", str(Path(sys.executable).parent / "apportion"), "train", TWIN, "--launcher", "env"]
TRAIN += ["--strategy", "data_parallel", "--run-dir", "{folder}/run"]
SCORE = str(BENCHMARKS / "sides/score_side.py")
SERVER, RPC, CHANNELS = (
    str(BENCHMARKS / "sides/server_side.py"),
    str(BENCHMARKS / "peers" / "store_rpc.py"),
    ("basic", "mpt_uv"),
)
STRAGGLER, STRAGGLER_ACCURACY = str(BENCHMARKS / "sides/straggler_side.py"), 0.97
STRAGGLER_ROUNDS, STRAGGLER_SECONDS = 3, 540
NBYTES = 100 << 20
PUSH_ROUNDS, PUSH_STEPS, PUSH_WARM_UP = 15, 5, 3
ROUNDS, ROUND_SECONDS, WARM_UP_STEPS = 15, 1.0, 4
STARTS = 5
SEEDS, TARGET, EVERY, MOST_STEPS, SCORE_ROUNDS = (0, 1, 2), 0.60, 25, 1950, 5
TO_SCORE = ("data_parallel(compress=power_sgd(rank=4))", "local_sgd(every=16)")
RATES = {"25m": 25e6, "100m": 1e8, "1g": 1e9}
BATCH = "128"


@dataclass(frozen=True)
class Against:
    """Examples/s of two sides that train the same on the same hosts."""

    what: str
    hosts: tuple[int, ...]
    rate: float
    ours: list[str]
    peer: list[str]
    unit: str = "examples/s"
    rounds: int = ROUNDS
    a_time: int = 1
    """Batches between two times that ours exchanges something: a round has so many, or a multiple of them."""

    def measure(self):
        """(ours, peer, ratio)."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        ranks = sum(self.hosts)
        with (
            several_hosts(self.hosts, self.rate) as hosts,
            Side(self.ours, ranks=ranks, hosts=hosts) as ours,
            Side(self.peer, ranks=ranks, hosts=hosts) as peer,
        ):
            for side in (ours, peer):
                side.wait_until_ready()
                side.go(WARM_UP_STEPS)
            steps = max(2, round(ROUND_SECONDS / mean(side.go(WARM_UP_STEPS) / WARM_UP_STEPS for side in (ours, peer))))
            steps = -(-steps // self.a_time) * self.a_time
            rounds = [(ours.go(steps), peer.go(steps)) for _ in range(self.rounds)]
        own, other = (steps * int(BATCH) / median(seconds) for seconds in zip(*rounds, strict=True))
        return own, other, median(b / a for a, b in rounds)


@dataclass(frozen=True)
class Bytes:
    """The bytes that a host sends in a step, over those that it must."""

    what: str
    hosts: tuple[int, ...]
    ours: list[str]
    most: float
    """Of W, the bytes of the gradient or of the weights."""
    a_time: int = 1
    """Batches that all ranks together take between two times that they exchange something."""
    unit: str = "MB"

    def measure(self):
        """(bytes sent, bytes that a ring would send, their ratio)."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        times = 40  # what is under way beside the steps when the count begins and ends is little of so many
        with (
            several_hosts(self.hosts, RATES["1g"]) as hosts,
            Side(self.ours, ranks=sum(self.hosts), hosts=hosts) as ours,
        ):
            ours.wait_until_ready()
            ours.go(WARM_UP_STEPS)
            before = hosts.sent()
            ours.go(times * self.a_time)
            sent = max(b - a for a, b in zip(before, hosts.sent(), strict=True)) / times
        must = self.most * 4 * PARAMETERS
        return sent / 1e6, must / 1e6, sent / must


@dataclass(frozen=True)
class ToScore:
    """The seconds to a score, of the best of some strategies and of DDP."""

    what: str
    strategies: tuple[str, ...]
    rate: float
    unit: str = "s"

    def measure(self):
        """What `table.result` takes: ours, peer and ratio, and the steps and seconds that they are made of. Who has the
        shorter steps goes first, and the others' steps are counted until they would take longer than the best."""
        exact, reached, given_up = self._steps("data_parallel", MOST_STEPS), {}, {}
        if exact > MOST_STEPS:
            raise SideFailed(f"data_parallel has not reached {TARGET} in {MOST_STEPS} steps")
        for strategy, (own, other, faster) in sorted(self._rates().items(), key=lambda item: -item[1][0]):
            best = min((found["ours"] for found in reached.values()), default=inf)
            most = int(min(MOST_STEPS, best * own / int(BATCH)))
            many = self._steps(strategy, most)
            if many > most:
                given_up[strategy] = {"more than": most, "steps/s": own / int(BATCH)}
                continue
            seconds = many * int(BATCH) / own, exact * int(BATCH) / other
            reached[strategy] = {"steps": many, "ours": seconds[0], "peer": seconds[1], "ratio": faster * exact / many}
        if not reached:
            raise SideFailed(f"none of {', '.join(given_up)} has reached {TARGET} in {MOST_STEPS} steps")
        best = min(reached, key=lambda strategy: reached[strategy]["ours"])
        found = {name: reached[best][name] for name in ("ours", "peer", "ratio")}
        return {**found, "best": best, "steps of DDP": exact, "tries": reached | given_up}

    def _rates(self):
        """(examples/s, DDP's, their ratio) of each strategy with the cable."""
        measured = {}
        for strategy in self.strategies:
            given, hosts, a_time = (ours(strategy, CIFAR), ddp(network=CIFAR)), (1, 1), 1
            if strategy.startswith("local_sgd"):  # its ranks take batches by themselves
                given[0].remove("memory")
                a_time = parse(strategy, "apportion.strategies").every * sum(hosts)
            measured[strategy] = Against(
                self.what, hosts, self.rate, *given, rounds=SCORE_ROUNDS, a_time=a_time
            ).measure()
        return measured

    def _steps(self, strategy, most):
        """The steps until the score, the median over the seeds; infinitely many where that are more than `most`."""
        return median(self._steps_of_a_seed(strategy, seed, most) for seed in SEEDS)

    def _steps_of_a_seed(self, strategy, seed, most):
        """On two hosts whose cable has no rate."""
        with several_hosts((1, 1)) as hosts, Side([SCORE, CIFAR, strategy, str(seed)], ranks=2, hosts=hosts) as side:
            side.wait_until_ready()
            steps = 0
            while (steps := steps + EVERY) <= most:
                if side.each(EVERY)[0] >= TARGET:
                    return steps
        return inf


@dataclass(frozen=True)
class PushPull:
    """MB/s of a push and a pull, of ours and of rpc."""

    what: str
    rate: float | None
    unit: str = "MB/s"

    def measure(self):
        """What `table.result` takes: ours, peer and ratio, what each channel of the peer gave, and of the cable."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        given = {"ours": [SERVER, str(NBYTES)]} | {name: [RPC, str(NBYTES), name] for name in CHANNELS}
        more = {"TP_SOCKET_IFNAME": "cable"}
        seconds = {name: [] for name in given}
        with several_hosts((1, 1), self.rate) as hosts, ExitStack() as stack:
            sides = {
                name: stack.enter_context(Side(command, ranks=2, hosts=hosts, more=more))
                for name, command in given.items()
            }
            for side in sides.values():
                side.wait_until_ready()
                side.go(PUSH_WARM_UP)
            steps = 1 if self.rate is not None else PUSH_STEPS
            for _ in range(PUSH_ROUNDS):
                for name, side in sides.items():
                    seconds[name].append(side.go(steps) / steps)
        best = min(CHANNELS, key=lambda name: median(seconds[name]))
        ratio = median(b / a for a, b in zip(seconds["ours"], seconds[best], strict=True))
        figures = {name: 2 * NBYTES / 1e6 / median(of) for name, of in seconds.items()}
        row = {"ours": figures["ours"], "peer": figures[best], "ratio": ratio, "channels": figures}
        return row if self.rate is None else row | {"of the cable": figures["ours"] * 8e6 / self.rate}


@dataclass(frozen=True)
class Straggler:
    """Seconds to an accuracy on three hosts, of which the second is slow."""

    what: str
    strategy: str
    ranks: tuple[int, ...]
    """Of each host; the second rank is the slow one."""
    unit: str = "s"

    def measure(self):
        """(ours, peer, ratio)."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        sides = (self.strategy, self.ranks), ("data_parallel", (1, 1, 1))
        rounds = [[self._seconds(*side) for side in sides] for _ in range(STRAGGLER_ROUNDS)]
        ours, peer = (median(seconds) for seconds in zip(*rounds, strict=True))
        return ours, peer, peer / ours

    def _seconds(self, strategy, ranks):
        many = sum(ranks)
        with several_hosts(ranks, RATES["1g"]) as hosts:
            port = hosts.port()
            started = [
                subprocess.Popen(
                    hosts.command(rank, [sys.executable, STRAGGLER, strategy, str(STRAGGLER_ACCURACY)]),
                    env=environment() | hosts.environment(rank, many, port) | {"SLOW_RANK": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(many)
            ]
            try:
                told, wrong = started[0].communicate(timeout=STRAGGLER_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise SideFailed(str(error)) from error
            finally:
                for process in started:
                    process.kill()
                for process in started[1:]:
                    process.communicate()
        if not told.strip():
            raise SideFailed(f"{strategy} did not come to {STRAGGLER_ACCURACY}: {wrong.strip().splitlines()[-1:]}")
        return float(told.split()[-1])


@dataclass(frozen=True)
class Startup:
    """Seconds to the first finished step of two commands under torchrun, on two hosts."""

    what: str
    ours: list[str]
    peer: list[str]
    unit: str = "s"

    def measure(self):
        """(ours, peer, ratio)."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        with several_hosts((1, 1), RATES["1g"]) as hosts:
            sides = self.ours, self.peer
            # One folder for all rounds: the proof of the first is reused only where the environment has not changed.
            with tempfile.TemporaryDirectory() as folder:
                rounds = [[first_step(hosts, side, Path(folder, "notes")) for side in sides] for _ in range(1 + STARTS)]
        ours, peer = (median(seconds) for seconds in zip(*rounds[1:], strict=True))
        return ours, peer, peer / ours


def first_step(hosts, command, folder):
    """Seconds from the command, given on each host, to each rank's first finished step; the folder is then removed."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={hosts.addresses[0]}", f"--master-port={hosts.port()}"]
    folder.mkdir()
    given = {"APPORTION_SECRET_FILE": hosts.secret, "GLOO_SOCKET_IFNAME": "cable", FOLDER: str(folder)}
    command = [part.format(folder=folder) for part in command]
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            hosts.command(rank, [*torchrun, f"--node-rank={rank}", *command]),
            env=environment() | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE)[0] for process in processes]
        notes = [float(note.read_text()) for note in folder.glob("rank*")]
    except subprocess.TimeoutExpired as error:
        raise SideFailed(str(error)) from error
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if any(process.returncode for process in processes) or len(notes) != 2:
        raise SideFailed(f"{command[0]} failed: {said[0].strip().splitlines()[-1:]}")
    return max(notes) - start


def ours(strategy="data_parallel", network=MLP):
    return [OURS, network, strategy, BATCH, "memory"]


def averaged(strategy):
    """Replicas take batches of their own in turn, which are not those in memory."""
    return [OURS, MLP, strategy, BATCH]


def ddp(*options, network=MLP):
    return [DDP, network, BATCH, "memory", *options]


def against_ddp(hosts, rate):
    many = f"{len(hosts)} hosts of {hosts[0]} ranks, {rate}"
    return Against(f"data_parallel against DDP, {many}", hosts, RATES[rate], ours(), ddp())


def compressed(method, rate, *options):
    """data_parallel with a compression, against DDP with these options, on two hosts of one rank."""
    against = f"DDP with {', '.join(options)}" if options else "DDP"
    what = f"data_parallel, {method}, against {against}, 2 hosts of 1 rank, {rate}"
    return Against(what, (1, 1), RATES[rate], ours(f"data_parallel(compress={method})"), ddp(*options))


KNOWN = (
    {
        f"hosts_ddp_{len(hosts)}x{hosts[0]}_{rate}": against_ddp(hosts, rate)
        for hosts, rate in (((2, 2), "100m"), ((2, 2), "1g"), ((1, 1), "1g"), ((1, 1, 1, 1), "1g"))
    }
    | {
        "hosts_fp16_2x1_1g": compressed("fp16", "1g", "fp16"),
        "hosts_fp16_2x1_1g_plain": compressed("fp16", "1g"),
        "hosts_fp16_2x1_100m": compressed("fp16", "100m", "fp16"),
        "hosts_fp16_2x1_100m_plain": compressed("fp16", "100m"),
        "hosts_int8_2x1_100m": compressed("int8", "100m"),
        "hosts_power_sgd_2x1_100m": compressed("power_sgd", "100m"),
        "hosts_target_25m": ToScore(
            "CIFAR-10 network to 0.60, 2 hosts of 1 rank, 25 Mb/s, against DDP", TO_SCORE, RATES["25m"]
        ),
        "hosts_straggler": Straggler(
            "MNIST to 0.97, 3 hosts, one 4x slower, parameter_server against data_parallel",
            "parameter_server(servers=1)",
            (1, 1, 2),
        ),
        "downpour_mnist_hosts": Straggler(
            "the same, with two servers and a copy of each", "parameter_server(servers=2, copies=1)", (1, 2, 2)
        ),
        "server_rpc_1g": PushPull("push + pull of 100 MiB, a server on another host, 1 Gb/s, against rpc", RATES["1g"]),
        "server_rpc_unlimited": PushPull("push + pull of 100 MiB, a server on another host, against rpc", None),
        "hosts_startup": Startup(
            "command to first finished step, digits, 2 hosts of 1 rank, apportion train against DDP",
            TRAIN,
            [str(BENCHMARKS / "peers" / "ddp_first_step.py")],
        ),
    }
    | {
        "hosts_open_rounds": ComingAndGoing(
            "loss after as many rounds, 4 hosts of which two come and go, against the two steady ones",
            'local_sgd(every=16, deadline="3 s")',
            deadline=3.0,
            rounds=400,
            rate=RATES["1g"],
        )
    }
    | {
        f"bytes_{name}": Bytes(f"bytes that a host sends in a step, {name}", hosts, ours(), most)
        for name, hosts, most in (
            ("2x1", (1, 1), 1.0),
            ("2x2", (2, 2), 1.0),
            ("3x1", (1, 1, 1), 4 / 3),
            ("4x1", (1, 1, 1, 1), 1.5),
            ("2+1", (2, 1), 1.0),
        )
    }
    | {
        f"bytes_local_sgd_{name}": Bytes(
            f"bytes that a host sends in a round of local_sgd, {name}",
            hosts,
            averaged(strategy),
            1.0,
            a_time=sum(hosts),
        )
        for name, hosts, strategy in (
            ("2x1", (1, 1), "local_sgd(every=1)"),
            ("2x2", (2, 2), "local_sgd(every=1)"),
            ("overlap_2x1", (1, 1), "local_sgd(every=1, overlap=True)"),
            ("overlap_2x2", (2, 2), "local_sgd(every=1, overlap=True)"),
        )
    }
    | {
        f"bytes_fully_sharded_{name}": Bytes(
            f"bytes that a host sends in a step of fully_sharded, {name}", hosts, ours("fully_sharded"), 1.5
        )
        for name, hosts in (("2x1", (1, 1)), ("2x2", (2, 2)))
    }
)

if __name__ == "__main__":
    sys.exit(main(__doc__, KNOWN, measured(KNOWN)))
