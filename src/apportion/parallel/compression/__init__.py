"""Sums of gradients between hosts that send less than their bytes."""
