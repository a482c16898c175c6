"""Which way to split a workload on the machines at hand: measured, predicted, explained."""
