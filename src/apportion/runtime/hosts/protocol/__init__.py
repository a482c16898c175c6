"""Who is in a run on several hosts: state machines of the driver and of the agents, which read no clock."""
