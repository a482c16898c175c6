"""KServe's client against a server at a URL: run by test_outside_clients.py in a process of its own, with .venv/kserve
first on its path.

    python kserve_client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
from every_datatype import VALUES
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


async def main(url: str) -> None:
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=15)) as client:
        assert await client.is_server_live(url)
        assert await client.is_server_ready(url)
        assert await client.is_model_ready(url, "every")
        assert not await client.is_model_ready(url, "none")
        for binary_in in (False, True):
            for binary_out in (False, True):
                await every_datatype_comes_back(client, url, binary_in=binary_in, binary_out=binary_out)
        await what_is_wrong_is_said(client, url)


async def every_datatype_comes_back(
    client: InferenceRESTClient, url: str, *, binary_in: bool, binary_out: bool
) -> None:
    tensors, asked = [], []
    for datatype, values in VALUES.items():
        tensor = InferInput(datatype, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, binary_data=binary_in or datatype == "FP16")  # which it sends as bytes alone
        tensors.append(tensor)
        binary = binary_out or datatype == "FP16"  # and takes as bytes alone
        asked.append(RequestedOutput(f"{datatype}_back", {"binary_data": binary}))
    request = InferRequest("every", tensors, request_id="7", request_outputs=asked)
    found = await client.infer(url, request, model_name="every")
    assert (found.id, found.model_name) == ("7", "every"), found
    assert [output.name for output in found.outputs] == [f"{datatype}_back" for datatype in VALUES]
    for output, (datatype, values) in zip(found.outputs, VALUES.items(), strict=True):
        array: Any = output.as_numpy()
        back = [v.encode() if isinstance(v, str) else v for v in array.tolist()]
        assert (output.datatype, array.dtype, back) == (datatype, values.dtype, values.tolist()), output


async def what_is_wrong_is_said(client: InferenceRESTClient, url: str) -> None:
    tensor = InferInput("FP32", [3], "FP64", data=[0.0, 0.0, 0.0])
    for model, why in (("every", "input BOOL is missing"), ("none", "model 'none' does not exist")):
        said = ""
        try:
            await client.infer(url, InferRequest(model, [tensor]), model_name=model)
        except httpx.HTTPStatusError as error:
            said = str(error)
        assert why in said, said


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    print("all as it should be")
