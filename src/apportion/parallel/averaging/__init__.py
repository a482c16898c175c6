"""Replicas that are averaged at intervals (local SGD, DiLoCo)."""
