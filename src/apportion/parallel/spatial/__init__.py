"""Images that are divided among ranks in space or by channels."""
