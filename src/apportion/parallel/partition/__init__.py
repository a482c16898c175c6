"""A model of which every rank holds a part: its step, its shards, resharding, committed state."""
