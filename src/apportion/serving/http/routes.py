"""The Open Inference Protocol over HTTP: the paths, the members that are asked, and the answers.

Every error is ``{"error": "..."}`` with a status that says where the fault lies: 400 in the request, 429 in too many of
them, 503 in the members, 504 in the deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from apportion.comm.sync import CACHE_LINE
from apportion.serving.config import ENSEMBLE, Serving
from apportion.serving.ensemble.deadline import absolute_deadline
from apportion.serving.ensemble.ensemble import Ensemble, EnsembleResult, InferenceRequest, PendingRequest
from apportion.serving.errors import DeadlineExceeded, NoQuorum, Overloaded
from apportion.serving.http.host_names import Hosts
from apportion.serving.http.request_head import Head, number
from apportion.serving.http.response import HTTPError, Response, Unread
from apportion.serving.log import log
from apportion.serving.metrics import Metrics
from apportion.serving.pool.frames import INLINE_BYTES, Arena, Lease, placed
from apportion.serving.protocol.v2 import (
    HEADER,
    NamedTensor,
    Request,
    Unfit,
    check_declared,
    read_request,
    shown,
    write_response,
)
from apportion.serving.runtimes.runtime import Spec


class App:
    """The routes of the server. ``pages``: the answers to GET besides the protocol's, by path: (content type, a
    function that returns the body)."""

    def __init__(  # noqa: PLR0913 (what it answers from)
        self,
        ensemble: Ensemble,
        serving: Serving,
        inbox: Arena,
        metrics: Metrics,
        *,
        version: str,
        pages: Mapping[str, tuple[bytes, Callable[[], bytes]]],
        hosts: Hosts,
    ) -> None:
        self.ensemble, self.serving, self.inbox = ensemble, serving, inbox
        self._metrics, self._version, self._pages, self._hosts = metrics, version, pages, hosts
        names = list(ensemble.members)
        self._models: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        self._models[ENSEMBLE] = tuple(names)
        self._specs = {model: ServedModel(*ensemble.specs[first]) for model, (first, *_) in self._models.items()}
        self.busy = 0
        """The number of requests for inference that are being answered."""
        self.draining = False
        self.unread = Unread()

    def opened(self, head: Head) -> Response | InferCall:
        """Return the response to this head, or the request that takes its body."""
        try:
            self._hosts.check(head)
        except HTTPError as error:
            return error.reply()
        if not (head.path.endswith("/infer") and head.path.count("/") > 3):
            return self._other(head.method, head.path)
        began, parts = time.perf_counter(), head.path.strip("/").split("/")
        model = parts[2] if len(parts) > 2 and parts[2] in self._models else "?"
        try:
            return InferCall(self, head, model, self._addressed(head, parts), began)
        except (HTTPError, Overloaded) as error:
            return self.noted(reply_to(error), model, began)

    # Metadata, health and pages

    def _other(self, method: str, path: str) -> Response:
        try:
            found = self._found(path)
            if method not in ("GET", "HEAD"):
                raise HTTPError(405, f"{path[:200]} is asked for with GET, not {method}", (b"allow", b"GET, HEAD"))
            return found()
        except HTTPError as error:
            return error.reply()
        except Exception as error:
            return defect(error)

    def _found(self, path: str) -> Callable[[], Response]:
        if path in self._pages:
            kind, body = self._pages[path]
            return lambda: Response(200, body(), kind)
        match parts := path.strip("/").split("/"):
            case ["v2"]:
                return lambda: _json_response(self._server())
            case ["v2", "health", "live"]:
                return lambda: _json_response({"live": True})
            case ["v2", "health", "ready"]:
                return lambda: _ready(self.ready)
            case ["v2", "models", model] | ["v2", "models", model, "versions", _]:
                self._known(parts, model)
                return lambda: _json_response(self._metadata(model))
            case ["v2", "models", model, "ready"] | ["v2", "models", model, "versions", _, "ready"]:
                self._known(parts, model)
                return lambda: self._model_ready(model)
        raise HTTPError(404, f"{path[:200]} does not exist")

    def _known(self, parts: Sequence[str], model: str) -> tuple[str, ...]:
        if model not in self._models:
            raise HTTPError(404, f"model {shown(model)} does not exist: it is one of {', '.join(self._models)}")
        if len(parts) > 4 and parts[3] == "versions" and parts[4] != VERSION:
            raise HTTPError(404, f"model {model!r} has no version {shown(parts[4])}: it is {VERSION!r}")
        return self._models[model]

    @property
    def ready(self) -> bool:
        """Return whether as many members as the quorum have answered since their processes were started, and the server
        is not ending."""
        return not self.draining and self._able(tuple(self.ensemble.members)) >= self.ensemble.quorum

    def _able(self, names: tuple[str, ...]) -> int:
        return sum(self.ensemble.members[name].batcher.proven for name in names)

    def _model_ready(self, model: str) -> Response:
        names = self._models[model]
        ready = not self.draining and self._able(names) >= min(self.ensemble.quorum, len(names))
        return _ready(ready, name=model)

    def _server(self) -> dict[str, Any]:
        return {"name": "apportion", "version": self._version, "extensions": ["binary_tensor_data"]}

    def _metadata(self, model: str) -> dict[str, Any]:
        served = self.specs(model)
        runtimes = dict.fromkeys(self.ensemble.members[name].runtime for name in self._models[model])
        return {
            "name": model,
            "versions": [VERSION],
            "platform": ", ".join(runtimes),
            "inputs": [_described(spec) for spec in served.inputs],
            "outputs": [_described(spec) for spec in served.outputs],
        }

    def specs(self, model: str) -> ServedModel:
        """Return the inputs and outputs of a model."""
        return self._specs[model]

    # Inference

    def _addressed(self, head: Head, parts: Sequence[str]) -> tuple[str, ...]:
        match parts:
            case ["v2", "models", model, "infer"] | ["v2", "models", model, "versions", _, "infer"]:
                names = self._known(parts, model)
            case _:
                raise HTTPError(404, f"{head.path[:200]} does not exist")
        if head.method != "POST":
            raise HTTPError(405, f"{head.path[:200]} is asked for with POST, not {head.method}", (b"allow", b"POST"))
        if self.draining:
            raise HTTPError(503, "the server is ending")
        if self.busy >= self.serving.most_requests:
            raise Overloaded(f"{self.busy} requests are being answered already", seconds=self.serving.deadline)
        return names

    def noted(self, reply: Response, model: str, began: float, result: EnsembleResult | None = None) -> Response:
        """Return the response, which is counted once it is sent."""
        reply.sent = lambda: self.note(model, reply.status, time.perf_counter() - began, result)
        return reply

    def note(self, model: str, status: int, seconds: float, result: EnsembleResult | None) -> None:
        """Count and log a request that has been answered."""
        about: dict[str, Any] = {"model": model, "status": status, "ms": round(seconds * 1e3, 3)}
        used: tuple[str, ...] = ()
        degraded = False
        if result is not None:
            used, degraded = result.answer.used, result.answer.degraded
            about["members_used"] = ",".join(used)
            if degraded:
                about["degraded"] = True
        self._metrics.answered(model, status, seconds, used, degraded=degraded)
        log("request", level="info" if status < 500 else "warning", **about)


def _described(spec: Spec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1 if n is None else n for n in spec.shape]}


def _json_response(answer: Mapping[str, Any], status: int = 200) -> Response:
    return Response(status, orjson.dumps(answer))


def _ready(ready: bool, **about: str) -> Response:
    """Return the response to a question whether the server or a model is ready; if not, it is 503 with an "error"."""
    if ready:
        return _json_response({**about, "ready": True})
    return _json_response({**about, "ready": False, "error": "fewer members have answered than the quorum needs"}, 503)


# A request for inference, from its head to its answer.


VERSION = "1"
BINARY = b"application/octet-stream"
JUDGED_JSON_BYTES = 64 << 10
"""The largest size in bytes of JSON that is read twice: once as soon as it has come, and again with the tensors that
follow it."""
LEFT = 499
"""The status under which it is counted that a client did not wait for its answer."""
_HEADER = HEADER.lower().encode()


class ServedModel:
    """The inputs and outputs of a model, and what every request to it needs of them."""

    def __init__(self, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._by_name = {spec.name: spec for spec in inputs}
        self.names = tuple(self._by_name)

    def check(self, name: str, datatype: str, shape: Sequence[int]) -> None:
        """Raise Unfit where the model does not take such a tensor."""
        spec = self._by_name.get(name)
        if spec is None:
            raise Unfit(f"input {shown(name)} is unknown: it is one of {', '.join(self.names)}")
        if (why := spec.refusal(datatype, shape)) is not None:
            raise Unfit(why)


class InferServer(Protocol):
    """The parts of the server that a request for inference needs."""

    @property
    def ensemble(self) -> Ensemble:
        """The members that compute the answer."""

    @property
    def serving(self) -> Serving:
        """The server's settings: its limits and deadlines."""

    @property
    def inbox(self) -> Arena:
        """The shared memory that bodies are read into."""

    @property
    def unread(self) -> Unread:
        """The answers that clients have not read yet."""

    busy: int
    """The number of requests for inference that are being answered."""

    def specs(self, model: str) -> ServedModel:
        """Return the inputs and the outputs of a model."""

    def noted(self, reply: Response, model: str, began: float, result: EnsembleResult | None = None) -> Response:
        """Return the response, which is counted once it is sent."""

    def note(self, model: str, status: int, seconds: float, result: EnsembleResult | None) -> None:
        """Count a request that has been answered."""


class InferCall:
    """A request for inference, which is counted among those that are being answered until it is over."""

    def __init__(self, app: InferServer, head: Head, model: str, names: tuple[str, ...], began: float) -> None:
        if head.encoding != b"identity":
            raise HTTPError(
                415, f"content-encoding {head.encoding[:40].decode('latin-1')!r} is not read: send it as it is"
            )
        self._json_bytes = None if head.json_bytes is None else number(_HEADER, head.json_bytes)
        self._app, self._model, self._names, self._began = app, model, names, began
        self._came = asyncio.get_running_loop().time()
        self._asking: PendingRequest | None = None
        self._request: Request | None = None
        self._respond: Callable[[Response], None] | None = None
        self._over = False
        app.busy += 1

    def room(self, length: int) -> tuple[memoryview, Lease | None]:
        """Return memory for the body. Members read large tensors where they lie; the first one begins on a cache
        line."""
        most = min(self._app.serving.most_bytes, self._app.inbox.nbytes - CACHE_LINE)
        if length > most:
            raise HTTPError(413, f"the body has {length} bytes, of {most} at most")
        self._check_json(length if self._json_bytes is None else self._json_bytes)
        if length <= INLINE_BYTES:
            return memoryview(bytearray(length)), None
        # The tensors begin after the JSON: the lease is shifted so that their first byte, and not that of the JSON,
        # lies on a cache line. Members then read the first tensor without copying it.
        before = -(self._json_bytes or 0) % CACHE_LINE
        lease = self._app.inbox.lease(before + length)
        if lease is None:
            raise Overloaded(f"no memory is free for {length} bytes now", seconds=self._app.serving.deadline)
        return lease.memory[before : before + length], lease

    def _check_json(self, size: int) -> None:
        if size > (most := self._app.serving.most_json_bytes):
            raise HTTPError(413, f"the request has {size} bytes of JSON, of {most} at most: send its tensors as bytes")

    def check_partial(self, so_far: memoryview) -> bool:
        """Refuse a long body by the JSON that it begins with, before its tensors come. Returns whether that is done."""
        size = self._json_bytes
        if size is None or not 0 < size <= JUDGED_JSON_BYTES:
            return True
        if len(so_far) < size:
            return False
        served = self._app.specs(self._model)
        check_declared(so_far[:size], takes=served.names, check=served.check)
        return True

    def body_received(self, body: memoryview, held: Lease | None, respond: Callable[[Response], None]) -> None:
        """Take the complete body and ask the members. ``respond`` is called once with the response, perhaps at once."""
        self._respond = respond
        try:
            self._check_json(len(body) if self._json_bytes is None else self._json_bytes)
            served = self._app.specs(self._model)
            self._request = request = read_request(body, self._json_bytes, takes=served.names, check=served.check)
            question = self._question(request, () if held is None else (held,))
            asking = self._app.ensemble.ask(question, self._answered)
            if not self._over:
                self._asking = asking
        except Exception as error:
            if self._over:  # it has been answered already
                defect(error)
            else:
                respond(self.failed(error))

    def _question(self, request: Request, held: tuple[Lease, ...]) -> InferenceRequest:
        app = self._app
        served = app.specs(self._model)
        given = _in_order(request, served.inputs)
        if request.outputs is not None:
            known = [spec.name for spec in served.outputs]
            if strange := [asked.name for asked in request.outputs if asked.name not in known]:
                raise ValueError(f"output {shown(strange[0])} is unknown: it is one of {', '.join(known)}")
        timeout = request.timeout
        if timeout is not None and timeout > app.serving.longest_deadline:
            raise ValueError(
                f"parameters.timeout={request.parameters['timeout']} is longer than the "
                f"{app.serving.longest_deadline * 1e6:.0f} microseconds that this server allows"
            )
        rows = len(given[0].array) if given[0].array.ndim else 1
        tensors, leases = placed([(tensor.datatype, tensor.array) for tensor in given], app.inbox, held)
        deadline = absolute_deadline(self._came, timeout, app.serving.deadline)
        return InferenceRequest(tensors, rows, deadline, self._names, leases, combined=self._model == ENSEMBLE)

    def _answered(self, found: EnsembleResult | Exception) -> None:
        assert self._respond is not None
        if self._over:
            return
        if isinstance(found, Exception):
            self._respond(self.failed(found))
            return
        try:
            reply = self._reply(found)
        except Exception as error:
            reply = self.failed(error)
        else:
            self._release()
            self._app.noted(reply, self._model, self._began, found)
        self._respond(reply)

    def _reply(self, result: EnsembleResult) -> Response:
        assert self._request is not None
        request, specs = self._request, self._app.specs(self._model).outputs
        found = {s.name: NamedTensor(s.name, s.datatype, x) for s, x in zip(specs, result.outputs, strict=True)}
        coming = sum(tensor.array.nbytes for tensor in found.values())
        # Room is made before the response is encoded, since encoding doubles the memory that the outputs take.
        self._app.unread.make_room(asyncio.get_running_loop().time(), coming=coming)
        asked = list(found.values()) if request.outputs is None else [found[asked.name] for asked in request.outputs]
        pieces, said = write_response(_head(self._model, request, result), asked, request)
        if said is None:
            return Response(200, b"".join(pieces))
        return Response(200, b"".join(pieces), BINARY, ((_HEADER, b"%d" % said),))

    def failed(self, error: Exception) -> Response:
        """End the request with an error, and return the response to it."""
        self._release()
        return self._app.noted(reply_to(error), self._model, self._began)

    def abandon(self) -> None:
        """Give the request up, because the client has gone: nothing more is computed for it."""
        if not self._over:
            asking = self._asking
            self._release()
            if asking is not None:
                asking.abandon()
            self._app.note(self._model, LEFT, time.perf_counter() - self._began, None)

    def _release(self) -> None:
        if not self._over:
            self._over, self._asking = True, None
            self._app.busy -= 1


def defect(error: Exception) -> Response:
    """Log an error of the server itself, and return the response to it."""
    log("defect", level="error", why=repr(error)[:500])
    return HTTPError(500, "the server failed at this request; its log says how").reply()


def _in_order(request: Request, inputs: tuple[Spec, ...]) -> list[NamedTensor]:
    """Return the tensors in the order in which the model takes them. Raises ValueError where one is missing, or their
    rows differ in number."""
    given = {tensor.name: tensor for tensor in request.inputs}
    found = []
    for spec in inputs:
        tensor = given.get(spec.name)
        if tensor is None:
            raise ValueError(f"input {spec.name} is missing")
        found.append(tensor)
    rows = {len(t.array) for t, spec in zip(found, inputs, strict=True) if spec.shape and spec.shape[0] is None}
    if len(rows) > 1:
        raise ValueError(f"inputs have {' and '.join(map(str, sorted(rows)))} rows: they need as many as each other")
    return found


def _head(model: str, request: Request, result: EnsembleResult) -> dict[str, Any]:
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


def reply_to(error: Exception) -> Response:
    """Return the response to an error."""
    said = _wrong(error)
    return defect(error) if said is None else said.reply()


def _wrong(error: Exception) -> HTTPError | None:
    """Return the error as an HTTPError; None where it is a defect of the server itself."""
    match error:
        case HTTPError():
            return error
        case Overloaded():
            return HTTPError(429, str(error), (b"retry-after", b"%d" % max(1, -int(-error.seconds // 1))))
        case DeadlineExceeded():
            return HTTPError(504, str(error))
        case NoQuorum():
            return HTTPError(503, str(error), (b"retry-after", b"1"))
        case ValueError():
            return HTTPError(400, str(error))
    return None
