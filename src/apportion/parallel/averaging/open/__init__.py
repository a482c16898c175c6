"""Rounds that close at their deadline, among replicas that come and go."""
