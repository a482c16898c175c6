"""Pure functions from what the ranks of a script have recorded to findings, one file for each class of mistake."""
