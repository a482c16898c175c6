"""Times rollouts of other sizes than a workload's own: more or fewer environments, more or fewer steps."""
