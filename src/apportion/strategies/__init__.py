"""Ways to divide the work of a step: peers, one file each; the folder is the registry."""
