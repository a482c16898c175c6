"""A rank that others reach when they come, without a meeting of all."""
