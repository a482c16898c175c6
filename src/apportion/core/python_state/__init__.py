"""State of a training that is no tensor of the network: attributes, counters, histories, private generators."""
