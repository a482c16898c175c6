"""Shards of a store on servers that workers of other hosts reach: connections, copies, the queue and the log."""
