"""The compiler of the target ``spiking``: a trained net as a graph of integrate-and-fire neurons."""
