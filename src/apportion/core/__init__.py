"""The contract between a workload, a strategy and a run: the nouns that all other packages speak in."""
