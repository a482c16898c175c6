"""The notice to end: the signals that give it, what a rank does that gets one, and the job that Slurm requeues."""
