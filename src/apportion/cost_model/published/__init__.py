"""Models of published results, which no other code of the package imports."""
