"""Averages of the weights over the updates of a training: one file each."""
