"""From a module to stages, and from stages to neurons."""
