"""Trained nets behind the Open Inference Protocol, that answer by a deadline though one of them has died or is slow."""
