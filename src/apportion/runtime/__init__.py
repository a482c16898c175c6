"""The processes of a run: how they are started, what they do, how they are watched, what they save."""
