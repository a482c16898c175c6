"""The graph of a network as torch.fx traces it, and what a graph cannot show."""
