"""Which way to split the work on the machines there are: measured, predicted, chosen, explained."""
