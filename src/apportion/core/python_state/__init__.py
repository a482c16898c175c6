"""State of a training that is not a tensor of the network: attributes, counters, histories, private generators."""
