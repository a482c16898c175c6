"""The side of the driver: start the workers, watch them, decide, replace, end."""
