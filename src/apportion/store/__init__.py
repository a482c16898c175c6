"""Weights and optimizer slots that several workers update, each when it has something to say."""
