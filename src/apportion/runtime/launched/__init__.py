"""Ranks that others have started: rank 0 drives them, which make steps in their own processes."""
