"""What the ranks of two hosts plan for themselves, against what is then measured on them. See planner.py.

Each network has its own pair of processes, one a host (on_host.py), for all rates of the cable.
"""

import json
import tempfile
from contextlib import contextmanager
from math import exp, log
from pathlib import Path
from statistics import median

from fresh import distinguishable, interval
from hosts import cannot, two_hosts
from parked import Side, SideFailed

BENCHMARKS = Path(__file__).resolve().parents[1]
NAMES = ("digits", "mlp10m", "cifar10", "resnet20", "gpt")
RATES = {"100m": 1e8, "1g": 1e9, "unlimited": None}
ROUNDS, ROUND_SECONDS = 21, 0.4
FEW = 3
"""Rounds of every candidate, before those that are close to the best of these are measured to the end."""
CLOSE = 1.3
ALONE, PARALLEL = "single_device", "data_parallel"
SLOWEST, FASTEST = 2.5e7, 1e10
"""Bits/s between which it is looked for. Above, the cable is not what limits: the machine copies no faster."""
HALVINGS = 6


@contextmanager
def joined(workload, rate):
    """A pair of ranks, parked, and their hosts."""
    why = cannot()
    if why is not None:
        raise SideFailed(why)
    with two_hosts(rate) as hosts, Side([str(BENCHMARKS / "sides/on_host.py"), workload], ranks=2, hosts=hosts) as side:
        side.wait_until_ready()
        yield hosts, side


def asked(side, *order):
    """Of all ranks; what one of them refuses is a ValueError."""
    answers = [json.loads(line) for line in side.ask(json.dumps(order))]
    for answer in answers:
        if "refused" in answer:
            raise ValueError(answer["refused"])
    return answers


def seconds(side, strategy, steps):
    """Of a step, by the slower rank."""
    return max(answer["seconds"] for answer in asked(side, strategy, steps)) / steps


def plan(side):
    """What the ranks choose, and what they have priced: {"strategy", "batch_size", "found": [...], "cluster", ...}."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        asked(side, "plan", file.name)
        return json.loads(Path(file.name).read_text())


def chosen(workload, label):
    """A row: the chosen strategy against the best of all exact ones."""
    with joined(workload, RATES[label]) as (_, side):
        told = plan(side)
        exact = list(dict.fromkeys([told["strategy"], *(p["strategy"] for p in told["found"] if p["exact"])]))
        once = {}
        for strategy in exact:
            try:
                seconds(side, strategy, 1)
                once[strategy] = seconds(side, strategy, 1)
            except ValueError as error:
                print(f"left out: {strategy}: {error}", flush=True)
        close = near(once, told["strategy"], 2 * CLOSE)
        few = in_turns(side, {s: once[s] for s in close}, FEW)
        close = near({s: median(few[s]) for s in close}, told["strategy"], CLOSE)
        taken = in_turns(side, {s: once[s] for s in close}, ROUNDS)
    best = min(taken, key=lambda s: median(taken[s]))
    own, least = taken[told["strategy"]], taken[best]
    low, high = interval([a / b for a, b in zip(own, least, strict=True)])
    predicted = {p["strategy"]: p["predicted"] for p in told["found"]}
    return {
        "what": f"chosen: {told['strategy']}; by prediction alone: {told['predicted']}; best: {best}",
        "ours": told["batch_size"] / median(own),
        "peer": told["batch_size"] / median(least),
        "ratio": median(least) / median(own),
        "interval": [low, high],
        "distinguishable": distinguishable(low, high),
        "points": [
            {"candidate": s, "predicted": predicted.get(s), "measured": median(t)} for s, t in (few | taken).items()
        ],
    }


def near(taken, always, factor):
    """The strategies that take less than so many times as long as the fastest, and one that is always among them."""
    return [s for s in taken if taken[s] < factor * min(taken.values()) or s == always]


def in_turns(side, once, rounds):
    """Seconds a step in each of so many rounds, of strategies of which one step takes so long."""
    many = {s: max(1, round(ROUND_SECONDS / t)) for s, t in once.items()}
    taken = {s: [] for s in once}
    for _ in range(rounds):
        for strategy in once:
            seconds(side, strategy, 1)  # a connection that was idle begins slowly
            taken[strategy].append(seconds(side, strategy, many[strategy]))
    return taken


def crossing(workload):
    """A row: the rate at which data_parallel is as fast as one host by itself, predicted and measured, in Mb/s. The
    prediction is made by ranks that have measured the cable as fast as it goes. Where it is faster at every rate, or
    at none, the end of the range stands for that: only who agrees about it is as near as 1."""
    with joined(workload, None) as (hosts, side):
        bits = asked(side, "crossing", ALONE, PARALLEL)[0]["bits"]
        predicted = FASTEST if bits is None else min(max(bits, SLOWEST), FASTEST)
        measured = measured_crossing(hosts, side)
    return {
        "what": f"above so many Mb/s {PARALLEL} on two hosts is faster than {ALONE}: "
        f"predicted {in_words(predicted)}, measured {in_words(measured)}",
        "ours": predicted / 1e6,
        "peer": measured / 1e6,
        "ratio": min(predicted, measured) / max(predicted, measured),
    }


def in_words(rate):
    """Of a crossing."""
    return {SLOWEST: "at every rate", FASTEST: "at none"}.get(rate, f"from {rate / 1e6:.0f} on")


def measured_crossing(hosts, side):
    """By halving, then on the line through the last two."""
    low, high = SLOWEST, FASTEST
    above = advantage(hosts, side, high)
    if above <= 0:
        return high
    below = advantage(hosts, side, low)
    if below >= 0:
        return low
    for _ in range(HALVINGS):
        middle = exp((log(low) + log(high)) / 2)
        now = advantage(hosts, side, middle)
        if now > 0:
            high, above = middle, now
        else:
            low, below = middle, now
    return exp(log(low) + (log(high) - log(low)) * -below / (above - below))


def advantage(hosts, side, rate):
    """Of data_parallel over one host at this rate: the logarithm of how many times as fast it is."""
    hosts.set_rate(rate)
    once = {strategy: seconds(side, strategy, 2) for strategy in (ALONE, PARALLEL)}
    taken = in_turns(side, once, ROUNDS)
    return median(log(a / b) for a, b in zip(taken[ALONE], taken[PARALLEL], strict=True))
