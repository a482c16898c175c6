"""Which way to split the work: measured, predicted, tried, chosen and explained."""
