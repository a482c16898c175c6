"""Batches: what a global batch is, how ranks take their rows of it, and how it is loaded ahead."""
