"""Conversion of a module to stages, and of stages to neurons."""
