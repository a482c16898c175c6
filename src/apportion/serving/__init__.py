"""Serves trained networks by the Open Inference Protocol, by a deadline though a member has died or is slow."""
