"""How ranks talk where they share no memory: connections that both ends have proved, and the collectives over them."""
