"""Export of a trained network to another runtime, held against the network itself."""
