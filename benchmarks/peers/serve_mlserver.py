"""A net behind MLServer: python serve_mlserver.py '{"port", "path", "net", "threads", "workers", "batch"}'

`workers`: its parallel_workers, 0 being the server's own process. `batch`: the most requests that its adaptive batching
puts together, within 1 ms; 0 is off. Its access log and its compression of answers are off; its metrics are on, as
apportion's are.
"""

import asyncio
import json
import sys

import uvloop
from mlserver import MLModel, MLServer
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters, ModelSettings, Settings
from mlserver.types import InferenceResponse
from onnx_net import end_with_input, session


class Net(MLModel):
    async def load(self):
        parameters = self.settings.parameters
        self.session = session(parameters.uri, parameters.extra["threads"])
        return True

    async def predict(self, payload):
        (y,) = self.session.run(None, {"input": NumpyCodec.decode_input(payload.inputs[0])})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", y)])


async def main(order):
    settings = Settings(
        host="127.0.0.1", http_port=order["port"], grpc_port=order["ports"][0], metrics_port=order["ports"][1],
        debug=False, parallel_workers=order["workers"], metrics_dir=order["folder"],
        environments_dir=order["folder"], gzip_enabled=False,
    )  # fmt: skip
    net = ModelSettings(
        name=order["path"].split("/")[3], implementation="serve_mlserver.Net",
        max_batch_size=order["batch"], max_batch_time=0.001 if order["batch"] else 0.0,
        parameters=ModelParameters(uri=order["net"], extra={"threads": order["threads"]}),
    )  # fmt: skip
    await MLServer(settings).start([net])


if __name__ == "__main__":
    end_with_input()
    uvloop.install()
    asyncio.run(main(json.loads(sys.argv[1])))
