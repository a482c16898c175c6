"""The predicted time and memory of a step: machines, profiles, placements, collectives, simulator."""
