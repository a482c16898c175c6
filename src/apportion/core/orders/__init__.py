"""Orders of the examples of an epoch: one file each."""
