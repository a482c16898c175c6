"""What strategies use to say what they cost: times of collectives, an event simulator, cuts, memory."""
