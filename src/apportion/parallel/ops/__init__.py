"""Replacements of layers: forms of matrix products, factored gradients, synchronized batch norm."""
