"""A net behind Ray Serve: python serve_ray.py '{"port", "path", "net", "threads", "replicas", "batch", "optimized"}'

`batch`: the most requests that @serve.batch puts together, within 1 ms; 1 is none. `optimized`: HAProxy in front and
RAY_SERVE_THROUGHPUT_OPTIMIZED, which its manual has for throughput. Its access log is off. It answers on 127.0.0.1, but
ports of its own and of HAProxy's figures are open on all addresses while it runs.
"""

import json
import os
import sys

ORDER = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
if ORDER.get("optimized"):  # all of this is read when Ray is imported
    folder = ORDER["folder"] + "/haproxy"
    os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    os.environ |= {
        f"RAY_SERVE_HAPROXY_{name}": value
        for name, value in {
            "CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "SOCKET_PATH": f"{folder}/admin.sock",
            "SERVER_STATE_BASE": folder,
            "SERVER_STATE_FILE": f"{folder}/server-state",
            "METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "METRICS_PORT": str(ORDER["ports"][0]),
            "STATS_PORT": str(ORDER["ports"][1]),
        }.items()
    }
os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
import numpy as np  # noqa: E402
import ray  # noqa: E402
from onnx_net import answer, session, until_input_ends  # noqa: E402
from ray import serve  # noqa: E402


class Net:
    def __init__(self, order):
        self.session = session(order["net"], order["threads"])

    async def __call__(self, request):
        (given,) = (await request.json())["inputs"]
        return answer(await self.run(np.array(given["data"], np.float32).reshape(given["shape"])))

    async def run(self, x):
        return self.session.run(None, {"input": x})[0]


class Batched(Net):
    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.001)
    async def run(self, xs):
        y = self.session.run(None, {"input": np.concatenate(xs)})[0]
        return np.split(y, len(y))


def main(order):
    logs = {"enable_access_log": False, "log_level": "WARNING"}
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False,
        _node_ip_address="127.0.0.1", _temp_dir=order["folder"],
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": order["port"]}, logging_config=logs)
        deployment = serve.deployment(
            Batched if order["batch"] > 1 else Net, name="net", num_replicas=order["replicas"],
            max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1}, logging_config=logs,
        )  # fmt: skip
        serve.run(deployment.bind(order), name="net", route_prefix=order["path"], logging_config=logs)
        until_input_ends()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(ORDER)
