"""The run directory and its checkpoints: written whole, checked when they are read."""
