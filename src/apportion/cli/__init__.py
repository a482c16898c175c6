"""The command line: arguments in, text for a terminal out."""
