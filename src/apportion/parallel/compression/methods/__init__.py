"""Ways to compress what travels between hosts: peers, one file each; the folder is the registry."""
