"""Proves that a training script computes on several ranks what it computes in one process, without a change to it."""
