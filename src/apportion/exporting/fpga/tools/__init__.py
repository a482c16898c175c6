"""Run programs of others on a circuit: simulators, a SAT solver, synthesis and place and route."""
