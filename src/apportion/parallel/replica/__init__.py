"""A whole copy of the model on each rank, and the sum of the gradients."""
