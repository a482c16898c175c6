"""What a seed decides: which examples a step sees, and the random numbers that are drawn for them."""
