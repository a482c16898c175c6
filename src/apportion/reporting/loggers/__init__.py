"""Loggers of runs in other programs: one file each."""
