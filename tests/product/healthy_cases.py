"""Which healthy training scripts there are: stacks x optimizers x accumulation x precision x schedules x networks x
data x evaluations x 2 and 3 ranks, chosen so that each pair of values that can stand together is in some script."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import astuple, dataclass
from functools import lru_cache

STACKS = ("ddp", "fsdp2", "tensor", "pipeline", "by hand", "accelerate", "trainer", "ddp in a class")
LEVELS: dict[str, tuple[object, ...]] = {
    "optimizer": ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "lbfgs"),
    "accumulation": (1, 2),
    "precision": ("float32", "bfloat16", "scaler"),
    "schedule": ("none", "per epoch", "warm-up", "cosine", "one cycle"),
    "network": ("mlp", "convolution", "lstm", "transformer", "embeddings"),
    "data": ("map", "drop last", "tail", "processes", "iterable", "slices", "draws", "dictionaries", "padded"),
    "evaluation": ("none", "sums", "rank 0", "every rank"),
    "dropout": (False, True),
    "clipping": (False, True),
    "ranks": (2, 3),
}


@dataclass(frozen=True)
class Case:
    """What one script is made of. ``data``: "slices" are each rank's part of one draw, "draws" each rank's own draws;
    a "tail" is a last batch that is smaller, of the same size on each rank."""

    stack: str
    optimizer: str
    accumulation: int
    precision: str
    schedule: str
    network: str
    data: str
    evaluation: str
    dropout: bool
    clipping: bool
    ranks: int
    seed: int = 0

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in astuple(self))


TOKENS = ("lstm", "transformer", "embeddings")
SAME_ROWS = ("tensor", "pipeline")
"""The stacks whose ranks read the same rows."""
CANDIDATES = 25
"""The draws of which each case is the best."""
ONLY: dict[str, dict[str, tuple[object, ...]]] = {
    "ddp in a class": {"optimizer": LEVELS["optimizer"][:-1]},
    "fsdp2": {
        "optimizer": LEVELS["optimizer"][:-1],
        "precision": ("float32", "bfloat16"),
        "evaluation": ("none", "sums", "every rank"),
    },
    "tensor": {
        "optimizer": LEVELS["optimizer"][:-1],
        "precision": ("float32", "bfloat16"),
        "network": ("mlp", "transformer"),
        "data": ("map", "drop last", "processes", "dictionaries"),
        "evaluation": ("none", "every rank"),
        "dropout": (False,),
    },
    "pipeline": {
        "optimizer": LEVELS["optimizer"][:-1],
        "accumulation": (1,),
        "precision": ("float32",),
        "network": ("mlp", "transformer", "convolution"),
        "data": ("map", "drop last", "processes", "dictionaries"),
        "evaluation": ("none",),
        "dropout": (False,),
        "clipping": (False,),
    },
    "accelerate": {
        "optimizer": LEVELS["optimizer"][:-1],
        "precision": ("float32", "bfloat16"),
        "data": ("map", "drop last", "tail", "processes", "dictionaries", "padded"),
        "evaluation": ("none", "sums"),
    },
    "trainer": {
        "optimizer": ("sgd", "adam", "adamw", "adagrad", "rmsprop"),
        "precision": ("float32", "bfloat16"),
        "schedule": ("none", "warm-up", "cosine"),
        "data": ("drop last", "tail", "processes", "dictionaries", "padded"),
        "evaluation": ("none", "sums"),
    },
}
"""The values that a stack is written with, where they are not all."""


def allowed(case: Case) -> bool:
    """Whether the values can stand together in one script without a mistake."""
    plain = (case.accumulation, case.precision, case.schedule, case.dropout, case.clipping)
    return (
        (case.data != "padded" or case.network in TOKENS)
        and (case.data != "tail" or case.accumulation == 1)  # a smaller micro-batch would weigh too much in its window
        and (case.optimizer != "lbfgs" or plain == (1, "float32", "none", False, False))
    )


def pairs(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in ("stack", *LEVELS)], 2))


def drawn(stack: str, seed: int, rng: random.Random) -> Case:
    """A case that is allowed."""
    while True:
        values = {name: rng.choice(ONLY.get(stack, {}).get(name, levels)) for name, levels in LEVELS.items()}
        case = Case(stack=stack, seed=seed, **values)  # type: ignore[arg-type]
        if allowed(case):
            return case


@lru_cache
def cases(count: int, seed: int = 0) -> tuple[Case, ...]:
    """``count`` cases, as many of each stack; each next one has the most new pairs of values among some that are drawn,
    and the rarest values where no pair is new."""
    rng = random.Random(seed)
    chosen: list[Case] = []
    seen: set[tuple[tuple[str, object], tuple[str, object]]] = set()
    used: Counter[tuple[str, object]] = Counter()
    while len(chosen) < count:
        candidates = [drawn(STACKS[len(chosen) % len(STACKS)], len(chosen), rng) for _ in range(CANDIDATES)]
        gains = [(len(pairs(case) - seen), -sum(used[n, getattr(case, n)] for n in LEVELS)) for case in candidates]
        best = candidates[gains.index(max(gains))]
        chosen.append(best)
        seen |= pairs(best)
        used.update((name, getattr(best, name)) for name in LEVELS)
    return tuple(chosen)
