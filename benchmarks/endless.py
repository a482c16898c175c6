"""A workload as both sides of a comparison train it: without evaluation and without end."""

from dataclasses import replace

from apportion.address import load_workload

STEPS = 10**9


def endless(address, batch_size=None):
    workload = replace(load_workload(address), evaluation=None, steps=STEPS)
    return workload if batch_size is None else replace(workload, batch_size=int(batch_size))
