"""The report about a script whose ranks do not go on, or do not call the same collectives: pure functions."""
