"""The runtimes that a network is exported to: peers, one file each; the folder is the registry."""
