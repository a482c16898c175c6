"""A workload as both sides of a comparison train it: without evaluation and without end."""

from dataclasses import replace

from apportion.core.address import load_workload

STEPS = 10**9
IN_MEMORY = 1
"""Batches of a side that takes them from memory, in turn: one, as warm in the cache as one that was just gathered."""


def endless(address, batch_size=None):
    workload = replace(load_workload(address), evaluation=None, steps=STEPS)
    return workload if batch_size is None else replace(workload, batch_size=int(batch_size))


def in_memory(source, shard):
    """The first batches of a rank, loaded: what is measured with them is the step alone."""
    batches = [source.at(number, shard) for number in range(IN_MEMORY)]
    for batch in batches:
        batch.inputs, batch.targets  # noqa: B018 (loads)
    return batches


def fused(optimizer):
    """The same optimizer, in torch's fastest form on a CPU."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    return optimizer
