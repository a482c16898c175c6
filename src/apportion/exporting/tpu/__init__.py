"""The compiler of the target StableHLO: a network and its training step for TPUs, by way of JAX."""
