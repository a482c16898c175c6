"""The Open Inference Protocol over HTTP: the paths, the members that are asked, and the answers.

Every error is ``{"error": "..."}`` with a status that says where the fault lies: 400 in the request, 429 in too many of
them, 503 in the members, 504 in the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from apportion.serving.config import ENSEMBLE, Serving
from apportion.serving.ensemble.ensemble import Ensemble, EnsembleResult
from apportion.serving.errors import Overloaded
from apportion.serving.http.host_names import Hosts
from apportion.serving.http.infer_request import VERSION, InferCall, ServedModel, defect, reply_to
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import HTTPError, Response, Unread
from apportion.serving.log import log
from apportion.serving.metrics import Metrics
from apportion.serving.pool.shared_arena import Arena
from apportion.serving.protocol.v2 import shown
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
