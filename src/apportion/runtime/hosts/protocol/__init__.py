"""The protocol between the driver of several hosts and their agents, as state machines without clock or network."""
