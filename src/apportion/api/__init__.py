"""The verbs of Python, one file each: train, run, check with its proof, compare, plan, serve, export."""
