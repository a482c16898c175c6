"""Workloads whose examples are made by the network itself: actors that play environments, and what is learnt of it."""
