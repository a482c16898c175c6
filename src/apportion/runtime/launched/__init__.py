"""Ranks that others have started: rank 0 drives them, each makes steps in its own process, and is told to end there."""
