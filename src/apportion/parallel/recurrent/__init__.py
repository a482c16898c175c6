"""Recurrent layers on ranks, chunk by chunk over time (wavefront)."""
