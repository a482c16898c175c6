"""A parameter server as a Ray actor: the worker and driver, parked. python store_ray.py BYTES

The actor has the weights and takes a step of plain SGD. The worker sends its gradient and gets the new weights, both by
Ray's object store, which is shared memory, and copies them into its own, as a model's weights are set. numpy alone:
this environment has Ray and no torch.
"""

import os
import sys
import tempfile
import time

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no warning about GPUs
import numpy as np
import ray


@ray.remote(num_cpus=0)
class ParameterServer:
    def __init__(self, n):
        self.weights = np.zeros(n, np.float32)
        self.step = np.zeros(n, np.float32)

    def push_pull(self, gradient):
        np.multiply(gradient, np.float32(-0.01), out=self.step)
        self.weights += self.step
        return self.weights


def main(nbytes):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        store = 24 * int(nbytes)
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=store, log_to_driver=False, _temp_dir=folder)
        serve(int(nbytes) // 4, answers)
        ray.shutdown()


def serve(n, answers):
    """Say ready, then run as many steps as each line says, and answer with the seconds that they took (parked.py needs
    torch)."""
    server = ParameterServer.remote(n)
    gradient = np.full(n, 1e-3, np.float32)
    weights = ray.get(server.push_pull.remote(gradient)).copy()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            np.copyto(weights, ray.get(server.push_pull.remote(gradient)))
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
