"""Real steps of candidates, measured in turns."""
