"""The changes of a cluster that would change the answer."""
