"""Ranks that others have started: rank 0 drives them, and each makes steps in its own process."""
