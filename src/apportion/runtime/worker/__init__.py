"""The side of a worker: from its first line to its last, and the loop of its steps."""
