"""The runtimes that a model is exported to, with one file for each; the folder is the registry."""
