"""What trained nets are exported to: peers, one file each; the folder is the registry."""
