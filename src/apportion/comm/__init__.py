"""How ranks talk: to each other (group), and to their supervisor (channel)."""
