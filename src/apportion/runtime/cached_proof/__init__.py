"""Cached proofs: what a proof holds for, and the files in which proofs are kept for later runs."""
