"""The records that a run and a plan leave to be read: the event log, its summary, and the pages."""
