"""Models of published results: what the cost model is held against, and no plan asks for."""
