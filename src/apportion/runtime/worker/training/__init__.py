"""The part of a run that each rank has: the loop of its steps, its events, its evaluations and its checkpoints."""
