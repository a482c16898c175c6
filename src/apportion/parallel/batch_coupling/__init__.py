"""The analysis of whether the rows of a batch depend on each other in a forward pass, and whole-batch statistics."""
