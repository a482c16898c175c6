"""Layers that are divided among ranks by rows, columns, heads, vocabulary or hidden units."""
