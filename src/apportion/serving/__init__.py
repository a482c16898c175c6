"""Trained networks behind the Open Inference Protocol, which answer by a deadline whatever happens."""
