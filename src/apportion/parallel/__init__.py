"""What strategies are built from, one package for each way to divide the work."""
