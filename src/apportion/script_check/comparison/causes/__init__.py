"""Why the ranks and one process part: one file for each family of causes."""
