"""What Slurm says to the tasks of a step: which ranks they are, and where they meet."""
