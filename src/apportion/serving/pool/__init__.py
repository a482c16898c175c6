"""Member processes: their queues, circuit breakers, handles, shared memory and frames."""
