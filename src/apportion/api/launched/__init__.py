"""Proofs and comparisons on ranks that are running already: all of them call the same."""
