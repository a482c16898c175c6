"""Scales, biases and numbers of steps, by calibration and training examples."""
