"""The state of private generators of random numbers (torch, numpy, Python) as plain values that can be compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def generator_state(generator: Any) -> Any:
    """The state of a generator as text, whole numbers and tuples of them, which can be compared."""
    if isinstance(generator, torch.Generator):
        return "torch", str(generator.device), generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return "python", generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return "numpy legacy", _frozen(generator.get_state(legacy=False))
    if isinstance(generator, np.random.BitGenerator):
        return "numpy bits", _frozen(generator.state)
    return "numpy", _frozen(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator of the same kind into a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state[2]), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state[1])
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_thawed(state[1]))
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = _thawed(state[1])
    else:
        generator.bit_generator.state = _thawed(state[1])


def new_generator(state: Any) -> Any:
    """A generator in this state. ValueError where the state names a kind that is not known."""
    kind = state[0]
    if kind == "torch":
        made: Any = torch.Generator(state[1])
    elif kind == "python":
        made = random.Random()
    elif kind == "numpy legacy":
        made = np.random.RandomState()
    else:
        name = dict(state[1]).get("bit_generator")
        if name not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
            raise ValueError(f"a numpy generator of kind {name!r} is not known")
        bits = getattr(np.random, name)()
        made = bits if kind == "numpy bits" else np.random.Generator(bits)
    set_generator_state(made, state)
    return made


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _frozen(value)) for name, value in state.items())
    if isinstance(state, np.ndarray):
        return "array", str(state.dtype), tuple(state.shape), state.tobytes()
    return state.item() if isinstance(state, np.generic) else state


def _thawed(state: Any) -> Any:
    if isinstance(state, tuple) and state[:1] == ("array",):
        return np.frombuffer(state[3], dtype=state[1]).reshape(state[2]).copy()
    return {name: _thawed(value) for name, value in state} if isinstance(state, tuple) else state
