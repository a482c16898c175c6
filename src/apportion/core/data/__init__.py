"""Data: how ranks take their rows of a batch, and how rows are loaded ahead.

A data set may be in parts, each of which is opened on some of the ranks alone (``core/parts.py``).
"""
