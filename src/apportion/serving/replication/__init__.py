"""A process for each member, or all members in one program; and which of the two is faster."""
