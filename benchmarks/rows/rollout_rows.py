"""What `reinforcement.py` measures, and how: two sides that play and learn in turn, the other one parked.

A side answers with the frames that it has played, the seconds, and the seconds of processor time of all its processes.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
from own_environment import in_front_of_ours
from parked import KEPT, Side
from sessions import SessionSide

BENCHMARKS = Path(__file__).resolve().parents[1]
ROUNDS, ROUND_SECONDS, TRIAL_SECONDS = 9, 2.0, 3.0
RESAMPLES = 10_000
SEEDS = (0, 1, 2, 3, 4)
PACKAGES = {"sb3": "sb3", "a3c_per_step": "sb3", "torchrl": "torchrl", "sample_factory": "sample_factory"}
"""Of peers/NAME.txt, by the side: the A3C of single steps scales Pong's frames by the same OpenCV."""
SCRIPTS = {name: f"{name}_side.py" for name in PACKAGES} | {"a3c_per_step": "a3c_per_step.py"}


@dataclass(frozen=True)
class Stretch:
    """What a side, all its ranks together, did between two moments."""

    frames: float = 0.0
    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other):
        return Stretch(self.frames + other.frames, self.wall + other.wall, self.cpu + other.cpu)

    @property
    def rates(self):
        """Frames a second, by the clock and by the processor."""
        return {"wall": self.frames / self.wall, "cpu": self.frames / self.cpu}


@dataclass(frozen=True, eq=False)
class Player:
    """A side and its order. `ranks` are ours; what a peer starts, it starts itself."""

    kind: str
    order: dict
    ranks: int = 1

    @property
    def name(self):
        """Its settings in words, without those that are not for a trial."""
        shown = ("strategy", "vector", "workers", "collectors", "serial", "environments", "steps")
        settings = self.order | self.order.get("settings", {})
        words = [f"{name}={settings[name]}" for name in shown if name in settings]
        return ", ".join(words + ([f"{self.ranks} workers"] if self.kind == "ours" else []))

    @property
    def a_call(self):
        """About how many frames a call of each of its ranks makes."""
        order = self.order | self.order.get("settings", {})
        shared = self.ranks if order.get("strategy", "").startswith("data_parallel") else 1
        width = order.get("actors", 1) / shared * order.get("environments", 1) * order.get("workers", 1)
        steps = order["n_steps"] if "n_steps" in order else 5 if self.kind == "sb3" else order["steps"]
        return width * steps * self.ranks

    def seeded(self, seed, **more):
        return Player(self.kind, self.order | {"seed": seed} | more, self.ranks)

    def start(self):
        """The parked side."""
        if self.kind == "ours":
            return Side([str(BENCHMARKS / "sides/rollout_side.py"), json.dumps(self.order)], ranks=self.ranks)
        script, more = BENCHMARKS / "peers" / SCRIPTS[self.kind], in_front_of_ours(PACKAGES[self.kind])
        return SessionSide([str(script), json.dumps(self.order)], ranks=1, more=KEPT | more)


def played(side, calls):
    """(what a side did, the rest of rank 0's answer)."""
    answers = [[float(word) for word in answer.split()] for answer in side.ask(calls)]
    frames, walls, cpus, *_ = zip(*answers, strict=True)
    return Stretch(sum(frames), max(walls), sum(cpus)), answers[0][3:]


def calls_for(side, seconds):
    """After a warm-up, the calls that take so long. The first call opens environments: it is not like the others."""
    played(side, 1)
    calls = 1
    while True:
        wall = played(side, calls)[0].wall
        if wall > 0.3 * seconds:
            return max(1, round(calls * seconds / wall))
        calls *= 2


def fastest(players, by):
    """(the fastest of some, what each came to). A single one needs no trial."""
    if len(players) == 1:
        return players[0], {}
    tried = {}
    for player in players:
        with player.start() as side:
            side.wait_until_ready()
            tried[player] = played(side, calls_for(side, TRIAL_SECONDS))[0].rates[by]
    return max(players, key=tried.get), {player.name: rate for player, rate in tried.items()}


def words(side, rates):
    return f"{side} {rates['wall']:.0f} frames/s, {rates['cpu']:.0f} frames a CPU-second"


@dataclass(frozen=True, eq=False)
class Rates:
    """Frames/s of ours and of a peer, each at the fastest of the settings that are given. by: "wall" or "cpu"."""

    what: str
    ours: tuple[Player, ...]
    peer: tuple[Player, ...]
    by: str = "wall"
    rounds: int = ROUNDS

    @property
    def unit(self):
        return {"wall": "frames/s", "cpu": "frames/CPU-s"}[self.by]

    def measure(self):
        """What `table.result` takes."""
        (own, tried), (other, its_tried) = fastest(self.ours, self.by), fastest(self.peer, self.by)
        with own.start() as ours, other.start() as peer:
            for side in (ours, peer):
                side.wait_until_ready()
            calls = [calls_for(side, ROUND_SECONDS) for side in (ours, peer)]
            rounds = [(played(ours, calls[0])[0].rates, played(peer, calls[1])[0].rates) for _ in range(self.rounds)]
        sides = [
            {by: median(rates[by] for rates in found) for by in ("wall", "cpu")} for found in zip(*rounds, strict=True)
        ]
        return {
            "ours": sides[0][self.by],
            "peer": sides[1][self.by],
            "ratio": median(a[self.by] / b[self.by] for a, b in rounds),
            "what": f"{self.what}: {words('ours', sides[0])}; {words('peer', sides[1])}",
            "settings": [own.name, other.name],
            "tried": [tried, its_tried],
            "rounds": rounds,
        }


@dataclass
class Racer:
    """A side on its way to a score."""

    player: Player
    side: Side
    score: float
    chunk: int
    spent: Stretch = field(default_factory=Stretch)
    best: float = float("-inf")
    over: bool = False

    @property
    def reached(self):
        return self.best >= self.score

    @cached_property
    def calls(self):
        """Of each of its ranks between two looks at the score."""
        return max(1, round(self.chunk / self.player.a_call))

    def go_on(self):
        """Train a little; the score is not part of the time."""
        stretch, (found,) = played(self.side, self.calls)
        self.spent += stretch
        self.best = max(self.best, found)
        self.over = self.reached or stretch.frames == 0 or self.spent.frames >= self.player.order["frames"]

    def told(self):
        return {
            "reached": self.reached, "best": self.best, "frames": self.spent.frames, "seconds": self.spent.wall,
            "CPU-seconds": self.spent.cpu, "budget": self.player.order["frames"],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class ToScore:
    """What it takes until the greedy mean of 100 episodes is `score`, looked at every `chunk` frames: seconds of
    training, or frames. Where the score is not reached it is what the whole budget takes. The players are trained from
    each seed side by side, in turns; figures are medians over the seeds, and the interval has the ratio of 95 % of the
    samples that are drawn from the seeds, with replacement."""

    what: str
    ours: Player
    peer: tuple[Player, ...]
    score: float
    chunk: int
    by: str = "seconds"
    seeds: tuple[int, ...] = SEEDS

    @property
    def unit(self):
        return {"seconds": "s", "frames": "frames"}[self.by]

    def measure(self):
        """What `table.result` takes."""
        other, tried = fastest(self.peer, "wall")
        races = [self._race(seed, other) for seed in self.seeds]
        found = [[racer.told() for racer in side] for side in zip(*races, strict=True)]
        ours, peer = ({name: median(told[name] for told in side) for name in side[0]} for side in found)
        own, its = ours[self.by], peer[self.by]
        low, high = self._interval(found)
        return {
            "ours": own,
            "peer": its,
            "ratio": self._ratio(own, its),
            "interval": [low, high],
            "what": f"{self.what}: {self._words('ours', found[0])}; {self._words('peer', found[1])}; "
            f"the ratio is from {low:.2f} to {high:.2f} in 95 % of samples of the seeds",
            "settings": [self.ours.name, other.name],
            "tried": tried,
            "seeds": dict(zip(("ours", "peer"), found, strict=True)),
        }

    def _ratio(self, own, its):
        """Of seconds how many times fewer, of frames how many times as many."""
        return its / own if self.by == "seconds" else own / its

    def _interval(self, found):
        """The lowest and the highest ratio of those samples. A seed's two runs stay together."""
        both = np.array([[told[self.by] for told in side] for side in found])
        drawn = np.random.default_rng(0).integers(both.shape[1], size=(RESAMPLES, both.shape[1]))
        own, its = np.median(both[:, drawn], axis=2)
        return np.quantile(self._ratio(own, its), (0.025, 0.975)).tolist()

    def _race(self, seed, other):
        with ExitStack() as stack:
            racers = []
            for player in (self.ours, other):
                side = stack.enter_context(player.seeded(seed, judge=True).start())
                racers.append(Racer(player, side, self.score, self.chunk))
            for racer in racers:
                racer.side.wait_until_ready()
            while going := [racer for racer in racers if not racer.over]:
                for racer in going:
                    racer.go_on()
        return racers

    def _words(self, name, tolds):
        """Every seed's, with the best score of those that did not come to it."""

        def one(told):
            missed = "" if told["reached"] else f" (its budget, best {told['best']:.0f})"
            return f"{told['seconds']:.1f} s {told['CPU-seconds']:.1f} CPU-s {told['frames']:.0f} frames{missed}"

        return f"{name} " + ", ".join(map(one, tolds))
