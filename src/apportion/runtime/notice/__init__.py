"""The notice to end: the signals that give it, and the job that Slurm requeues."""
