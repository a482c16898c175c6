"""A net behind LitServe: python serve_litserve.py '{"port", "path", "net", "threads", "workers", "batch"}'

`workers`: its workers_per_device, each with an HTTP server of its own, as is its default. `batch`: its max_batch_size,
within 1 ms; 1 is none. Its access log is off. Its fast_queue is not tried: in 0.2.19 the argument is lost on the way
(TransportConfig has no such field), and set by hand, with batches, no request was answered.
"""

import json
import sys

import litserve
import numpy as np
from onnx_net import answer, end_with_input, session


class Net(litserve.LitAPI):
    def __init__(self, order):
        super().__init__(
            max_batch_size=order["batch"], batch_timeout=0.001 if order["batch"] > 1 else 0.0, api_path=order["path"]
        )
        self.order = order

    def setup(self, device):
        self.session = session(self.order["net"], self.order["threads"])

    def decode_request(self, request):
        (given,) = request["inputs"]
        return np.array(given["data"], np.float32).reshape(given["shape"])

    def batch(self, inputs):
        return np.concatenate(inputs)

    def predict(self, x):
        return self.session.run(None, {"input": x})[0]

    def unbatch(self, output):
        return np.split(output, len(output))

    def encode_response(self, y):
        return answer(y)


def main(order):
    server = litserve.LitServer(Net(order), accelerator="cpu", workers_per_device=order["workers"])
    server.run(host="127.0.0.1", port=order["port"], log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    end_with_input()
    main(json.loads(sys.argv[1]))
