"""Compile a network to a circuit in Verilog: fixed point, adders, pipeline, proof, simulation and synthesis."""
