"""One copy of the weights for all ranks of a host, in two versions; each rank updates a slice."""
