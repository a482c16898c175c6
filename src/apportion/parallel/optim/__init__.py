"""The optimizers of torch on flat pieces of memory."""
