"""Ways to start the processes of a run: peers, one file each; the folder is the registry."""
