"""What a plan says of rollouts of other sizes: frames a second, and why cores win or not."""
