"""Data sets in parts: which rank has which of them, how their rows make batches, and how their lengths become known."""
