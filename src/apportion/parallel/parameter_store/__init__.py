"""Weights and optimizer slots that several workers push to and pull from."""
