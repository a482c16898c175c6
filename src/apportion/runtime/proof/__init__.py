"""What a proof compares and how it is remembered: short workloads, taps, digests, the verdict."""
