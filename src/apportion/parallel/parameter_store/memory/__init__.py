"""The shared memory of a parameter store: its layout, the records in it, and its arrays."""
