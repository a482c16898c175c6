"""Why the ranks and one process differ: one file for each family of causes."""
