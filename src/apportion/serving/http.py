"""The Open Inference Protocol over HTTP: what is asked, of whom, and how it is answered.

Plain ASGI: a request is two calls of the server's and one of the ensemble's. Whatever goes wrong is
``{"error": "..."}`` with a status that says whose fault it is: 400 the request's, 429 too many of them, 503 the
members', 504 the deadline's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import orjson

from apportion.serving.deadline import DeadlineExceeded, NoQuorum, Overloaded, expires
from apportion.serving.ensemble import Ensemble, Result
from apportion.serving.frames import Placed
from apportion.serving.log import log
from apportion.serving.metrics import Metrics
from apportion.serving.places import ENSEMBLE
from apportion.serving.program import Spec
from apportion.serving.protocol import HEADER, Named, Request, read_request, write_response
from apportion.serving.seat import Refused
from apportion.serving.serving import Serving

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Reply = tuple[int, list[tuple[bytes, bytes]], bytes]

VERSION = "1"
_JSON = (b"content-type", b"application/json")
_HEADER = HEADER.lower().encode()


class Wrong(Exception):
    """An answer that is no result: its status, its sentence, and headers."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.headers = status, list(headers)


class App:
    """``pages``: what is answered to GET besides the protocol, by its path: (content type, a function of its body)."""

    def __init__(
        self,
        ensemble: Ensemble,
        serving: Serving,
        metrics: Metrics,
        *,
        version: str,
        pages: Mapping[str, tuple[bytes, Callable[[], bytes]]],
    ) -> None:
        self._ensemble, self._serving, self._metrics = ensemble, serving, metrics
        self._version, self._pages = version, pages
        names = list(ensemble.members)
        self._models: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        self._models[ENSEMBLE if len(names) > 1 else names[0]] = tuple(names)
        self._busy = 0
        self.draining = False

    @property
    def busy(self) -> int:
        """Requests for inference that are being answered."""
        return self._busy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        assert scope["type"] == "http", scope["type"]
        path: str = scope["path"]
        if path.endswith("/infer") and path.count("/") > 3:
            status, headers, pieces = await self._infer(scope, receive)
        else:
            status, headers, pieces = self._other(scope["method"], path)
        size = sum(len(piece) for piece in pieces)
        headers.append((b"content-length", b"%d" % size))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else b"".join(pieces)
        await send({"type": "http.response.body", "body": body})

    # What is no inference

    def _other(self, method: str, path: str) -> tuple[int, list[tuple[bytes, bytes]], list[Any]]:
        try:
            found = self._found(path)
            if method not in ("GET", "HEAD"):
                raise Wrong(405, f"{path} is asked for with GET, not {method}", (b"allow", b"GET, HEAD"))
            status, kind, body = found()
        except Wrong as wrong:
            return wrong.status, [_JSON, *wrong.headers], [_error(str(wrong))]
        return status, [(b"content-type", kind)], [body]

    def _found(self, path: str) -> Callable[[], tuple[int, bytes, bytes]]:
        if path in self._pages:
            kind, body = self._pages[path]
            return lambda: (200, kind, body())
        match path.strip("/").split("/"):
            case ["v2"]:
                return lambda: _told(self._server())
            case ["v2", "health", "live"]:
                return lambda: _told({"live": True})
            case ["v2", "health", "ready"]:
                return lambda: _told({"ready": self.ready}, 200 if self.ready else 503)
            case ["v2", "models", model] | ["v2", "models", model, "versions", _]:
                self._known(path, model)
                return lambda: _told(self._metadata(model))
            case ["v2", "models", model, "ready"] | ["v2", "models", model, "versions", _, "ready"]:
                self._known(path, model)
                return lambda: self._model_ready(model)
        raise Wrong(404, f"there is no {path}")

    def _known(self, path: str, model: str) -> tuple[str, ...]:
        parts = path.strip("/").split("/")
        if model not in self._models:
            raise Wrong(404, f"there is no model {model!r}: it is one of {', '.join(self._models)}")
        if len(parts) > 4 and parts[3] == "versions" and parts[4] != VERSION:
            raise Wrong(404, f"model {model!r} has no version {parts[4]!r}: it is {VERSION!r}")
        return self._models[model]

    @property
    def ready(self) -> bool:
        """Have as many members as the quorum answered, since their processes were started, and does it go on?"""
        return not self.draining and self._able(tuple(self._ensemble.members)) >= self._ensemble.quorum

    def _able(self, names: tuple[str, ...]) -> int:
        return sum(self._ensemble.members[name].proven for name in names)

    def _model_ready(self, model: str) -> tuple[int, bytes, bytes]:
        names = self._models[model]
        ready = not self.draining and self._able(names) >= min(self._ensemble.quorum, len(names))
        return _told({"name": model, "ready": ready}, 200 if ready else 503)

    def _server(self) -> dict[str, Any]:
        return {"name": "apportion", "version": self._version, "extensions": ["binary_tensor_data"]}

    def _metadata(self, model: str) -> dict[str, Any]:
        inputs, outputs = self._specs(model)
        runtimes = dict.fromkeys(self._ensemble.members[name].runtime for name in self._models[model])
        return {
            "name": model,
            "versions": [VERSION],
            "platform": ", ".join(runtimes),
            "inputs": [_described(spec) for spec in inputs],
            "outputs": [_described(spec) for spec in outputs],
        }

    def _specs(self, model: str) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        seat = self._ensemble.members[self._models[model][0]]
        each = len(seat.outputs) // sum(other is seat for other in self._ensemble.members.values())
        outputs = seat.outputs[:each]
        if each < len(seat.outputs):  # of a merged program: "m1/output"
            outputs = tuple(replace(spec, name=spec.name.partition("/")[2]) for spec in outputs)
        return seat.inputs, outputs

    # Inference

    async def _infer(self, scope: Scope, receive: Receive) -> tuple[int, list[tuple[bytes, bytes]], list[Any]]:
        began, model = time.perf_counter(), "?"
        result: Result | None = None
        self._busy += 1
        try:
            names, model = self._addressed(scope)
            json_bytes, length = self._headers(scope)
            came = asyncio.get_running_loop().time()
            try:
                body = await asyncio.wait_for(self._body(receive, length), self._serving.body_seconds)
            except TimeoutError:
                raise Wrong(408, "the body did not come in time", (b"connection", b"close")) from None
            request = read_request(body, json_bytes)
            result = await self._answered(model, names, request, came)
            pieces, said = write_response(_head(model, request, result), self._outputs(model, request, result), request)
            status, headers = 200, [_JSON]
            if said is not None:
                headers = [(b"content-type", b"application/octet-stream"), (_HEADER, b"%d" % said)]
        except (Wrong, ValueError, DeadlineExceeded, NoQuorum, Overloaded) as error:
            wrong = _wrong(error)
            status, headers, pieces = wrong.status, [_JSON, *wrong.headers], [_error(str(wrong))]
        except Exception as error:
            log("defect", level="error", why=repr(error)[:500])
            status, headers, pieces = 500, [_JSON], [_error("the server failed at this request; its log says how")]
        finally:
            self._busy -= 1
        self._note(model, status, time.perf_counter() - began, result)
        return status, headers, pieces

    def _addressed(self, scope: Scope) -> tuple[tuple[str, ...], str]:
        path: str = scope["path"]
        match path.strip("/").split("/"):
            case ["v2", "models", model, "infer"] | ["v2", "models", model, "versions", _, "infer"]:
                names = self._known(path, model)
            case _:
                raise Wrong(404, f"there is no {path}")
        if scope["method"] != "POST":
            raise Wrong(405, f"{path} is asked for with POST, not {scope['method']}", (b"allow", b"POST"))
        if self.draining:
            raise Wrong(503, "the server is ending", (b"connection", b"close"))
        if self._busy > self._serving.most_requests:
            raise Overloaded(f"{self._busy - 1} requests are being answered already", seconds=self._serving.deadline)
        return names, model

    def _headers(self, scope: Scope) -> tuple[int | None, int | None]:
        """(the JSON's bytes, the body's), where they are said."""
        said: dict[bytes, int] = {}
        for name, value in scope["headers"]:
            if name in (_HEADER, b"content-length"):
                if not value.isdigit() or len(value) > 18:
                    raise Wrong(400, f"{name.decode()}: {value.decode(errors='replace')!r} is no number of bytes")
                said[name] = int(value)
            elif name == b"content-encoding" and value != b"identity":
                raise Wrong(415, f"content-encoding {value.decode(errors='replace')!r} is not read: send it as it is")
        return said.get(_HEADER), said.get(b"content-length")

    async def _body(self, receive: Receive, length: int | None) -> bytes:
        most = self._serving.most_bytes
        if length is not None and length > most:
            raise Wrong(413, f"the body has {length} bytes, of {most} at most")
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Wrong(400, "the connection ended before the body did")
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise Wrong(413, f"the body has more than {most} bytes")
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _answered(self, model: str, names: tuple[str, ...], request: Request, came: float) -> Result:
        inputs, outputs = self._specs(model)
        tensors = _in_order(request, inputs)
        if request.outputs is not None:
            known = [spec.name for spec in outputs]
            if strange := [asked.name for asked in request.outputs if asked.name not in known]:
                raise ValueError(f"there is no output {strange[0]!r}: it is one of {', '.join(known)}")
        timeout = request.timeout
        if timeout is not None and timeout > self._serving.longest_deadline:
            raise ValueError(
                f"parameters.timeout={request.parameters['timeout']} is longer than the "
                f"{self._serving.longest_deadline * 1e6:.0f} microseconds that this server allows"
            )
        rows = len(tensors[0].array) if tensors[0].array.ndim else 1
        return await self._ensemble.infer(tensors, rows, expires(came, timeout, self._serving.deadline), names)

    def _outputs(self, model: str, request: Request, result: Result) -> list[Named]:
        specs = self._specs(model)[1]
        found = {s.name: Named(s.name, s.datatype, x) for s, x in zip(specs, result.outputs, strict=True)}
        return list(found.values()) if request.outputs is None else [found[asked.name] for asked in request.outputs]

    def _note(self, model: str, status: int, seconds: float, result: Result | None) -> None:
        metrics = self._metrics
        metrics.of(metrics.latency, model).observe(seconds)
        metrics.of(metrics.answers, model, str(status)).inc()
        about: dict[str, Any] = {"model": model, "status": status, "ms": round(seconds * 1e3, 3)}
        if result is not None:
            for name in result.answer.used:
                metrics.of(metrics.used, name).inc()
            about["members_used"] = ",".join(result.answer.used)
            if result.answer.degraded:
                metrics.of(metrics.degraded, model).inc()
                about["degraded"] = True
        log("request", level="info" if status < 500 else "warning", **about)


def _in_order(request: Request, inputs: tuple[Spec, ...]) -> list[Placed]:
    """The tensors as the net takes them. ValueError where one is missing, strange or unfit."""
    given = {tensor.name: tensor for tensor in request.inputs}
    if strange := [name for name in given if name not in {spec.name for spec in inputs}]:
        raise ValueError(f"there is no input {strange[0]!r}: it is one of {', '.join(spec.name for spec in inputs)}")
    found = []
    for spec in inputs:
        tensor = given.get(spec.name)
        if tensor is None:
            raise ValueError(f"input {spec.name} is missing")
        if (why := spec.refusal(tensor.datatype, tensor.array.shape)) is not None:
            raise ValueError(why)
        found.append(Placed(tensor.datatype, tensor.array))
    rows = {len(t.array) for t, spec in zip(found, inputs, strict=True) if spec.shape and spec.shape[0] is None}
    if len(rows) > 1:
        raise ValueError(f"inputs have {' and '.join(map(str, sorted(rows)))} rows: they need as many as each other")
    return found


def _head(model: str, request: Request, result: Result) -> dict[str, Any]:
    answer = result.answer
    head: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if request.id is not None:
        head["id"] = request.id
    head["parameters"] = {
        "members_used": ",".join(answer.used),
        "members_late": ",".join(answer.late),
        "members_failed": ",".join(answer.failed),
        "members_absent": ",".join(answer.absent),
        "degraded": answer.degraded,
    }
    return head


def _wrong(error: Exception) -> Wrong:
    match error:
        case Wrong():
            return error
        case Overloaded():
            return Wrong(429, str(error), (b"retry-after", b"%d" % max(1, -int(-error.seconds // 1))))
        case DeadlineExceeded():
            return Wrong(504, str(error))
        case NoQuorum():
            return Wrong(503, str(error), (b"retry-after", b"1"))
    assert isinstance(error, (ValueError, Refused)), error
    return Wrong(400, str(error))


def _described(spec: Spec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1 if n is None else n for n in spec.shape]}


def _told(answer: Mapping[str, Any], status: int = 200) -> tuple[int, bytes, bytes]:
    return status, b"application/json", orjson.dumps(answer)


def _error(message: str) -> bytes:
    return orjson.dumps({"error": message})
