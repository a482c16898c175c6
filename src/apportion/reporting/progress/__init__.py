"""A run as it goes, for a person: a bar on a terminal or in a notebook, and plain lines elsewhere."""
