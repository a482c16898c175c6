"""What the programs that read NIR files compute, and graphs rewritten so that they compute the right thing."""
