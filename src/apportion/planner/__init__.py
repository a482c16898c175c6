"""The choice of a strategy for a workload and its machines: searched, measured, predicted, explained."""
