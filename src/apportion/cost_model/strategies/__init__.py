"""The price of each strategy, one file each."""
