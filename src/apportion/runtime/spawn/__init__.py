"""Workers that are forked from a process which has torch imported already."""
