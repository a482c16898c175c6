"""What launchers of several hosts have in common: how the agent of a host is started, and what a launcher must do."""
