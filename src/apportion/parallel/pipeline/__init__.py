"""Stages of a network, their schedules and their microbatches."""
