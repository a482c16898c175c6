"""Measurements of machines and of workloads: the side of the driver and the side of its workers."""
