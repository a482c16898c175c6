"""Runs on several hosts: an agent on each, and the driver that starts, hears and ends them."""
