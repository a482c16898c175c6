"""The pages for a person or a monitor: the page at /, the numbers that it shows, metrics, and the OpenAPI file."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from apportion.serving.config import Serving
from apportion.serving.ensemble.ensemble import Ensemble
from apportion.serving.metrics import Metrics
from apportion.serving.pool.frames import Arena
from apportion.serving.protocol.datatypes import DATATYPES
from apportion.serving.protocol.v2 import HEADER, MOST_DIMS, MOST_TIMEOUT
from apportion.serving.replication.choose import Staffed


def openapi_document(ensemble: Ensemble, serving: Serving) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of this server."""
    names = list(ensemble.members)
    models = [*names, "ensemble"] if len(names) > 1 else names
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": models}}
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "enum": ["1"]}}
    paths: dict[str, Any] = {
        "/v2": {"get": _get("server metadata", "Server")},
        "/v2/health/live": {"get": _get("is there a server", "Live")},
        "/v2/health/ready": {"get": _get("have a quorum of members answered", "Ready", unready=True)},
        "/metrics": {"get": {"summary": "for Prometheus", "responses": {"200": _text("text/plain")}}},
        "/": {"get": {"summary": "the page", "responses": {"200": _text("text/html")}}},
        "/status": {"get": _get("what the page shows", "Status")},
        "/openapi.json": {"get": _get("this file", "OpenAPI")},
    }
    for base, where in (("/v2/models/{model}", [model]), ("/v2/models/{model}/versions/{version}", [model, version])):
        paths[base] = {"parameters": where, "get": _get("model metadata", "Model", model=True)}
        paths[f"{base}/ready"] = {
            "parameters": where, "get": _get("has the model answered", "ModelReady", unready=True, model=True)
        }  # fmt: skip
        paths[f"{base}/infer"] = {"parameters": where, "post": _infer()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "apportion serve",
            "version": metadata.version("apportion"),
            "summary": "Open Inference Protocol V2",
        },
        "paths": paths,
        "components": {"schemas": _schemas(serving)},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str, description: str, *headers: str) -> dict[str, Any]:
    found: dict[str, Any] = {"description": description, "content": {"application/json": {"schema": _ref(name)}}}
    if headers:
        found["headers"] = {h: {"schema": {"type": "string", "pattern": "^[0-9]+$"}} for h in headers}
    return found


def _text(kind: str) -> dict[str, Any]:
    return {"description": "text", "content": {kind: {"schema": {"type": "string"}}}}


def _get(summary: str, schema: str, *, unready: bool = False, model: bool = False) -> dict[str, Any]:
    responses = {"200": _json(schema, summary)}
    if unready:
        responses["503"] = _json(schema, "not yet, or no longer")
    if model:
        responses["404"] = _json("Error", "there is no such model or version")
    return {"summary": summary, "responses": responses}


def _infer() -> dict[str, Any]:
    header = {
        "name": HEADER, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 1},
        "description": "bytes of JSON, where the bytes of tensors follow it",
    }  # fmt: skip
    binary = {"schema": {"type": "string", "format": "binary"}}
    ok = _json("InferenceResponse", "the outputs")
    ok["content"]["application/octet-stream"] = binary
    ok["headers"] = {HEADER: {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
    return {
        "summary": "inference",
        "parameters": [header],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("InferenceRequest")}, "application/octet-stream": binary},
        },
        "responses": {
            "200": ok,
            "400": _json("Error", "the request is wrong"),
            "404": _json("Error", "there is no such model or version"),
            "408": _json("Error", "the body did not come in time"),
            "413": _json("Error", "the body is too large"),
            "415": _json("Error", "the body is compressed"),
            "429": _json("Error", "too many requests", "Retry-After"),
            "431": _json("Error", "the head is too large"),
            "503": _json("Error", "too few members are left", "Retry-After"),
            "504": _json("Error", "too few members answered by the deadline"),
        },
    }


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _schemas(serving: Serving) -> dict[str, Any]:
    text, flag = {"type": "string"}, {"type": "boolean"}
    shape = {"type": "array", "maxItems": MOST_DIMS, "items": {"type": "integer", "minimum": -1}}
    own_shape = {"type": "array", "maxItems": MOST_DIMS, "items": {"type": "integer", "minimum": 0}}
    datatype = {"type": "string", "enum": list(DATATYPES)}
    described = _object(["name", "datatype", "shape"], name=text, datatype=datatype, shape=shape)
    size = {"type": "integer", "minimum": 0}
    tensor = _object(
        ["name", "datatype", "shape"],
        name=text, datatype=datatype, shape=own_shape, data={"type": "array"},
        parameters=_object([], binary_data_size=size),
    )  # fmt: skip
    most = min(MOST_TIMEOUT, int(serving.longest_deadline * 1e6))
    timeout = {"type": "integer", "minimum": 0, "maximum": most, "description": "microseconds; 0: the server's own"}
    return {
        "Error": _object(["error"], error=text),
        "Server": _object(["name", "version", "extensions"], name=text, version=text, extensions={"type": "array"}),
        "Live": _object(["live"], live=flag),
        "Ready": _object(["ready"], ready=flag),
        "ModelReady": _object(["name", "ready"], name=text, ready=flag),
        "Status": _object(["members", "models"], members={"type": "array"}, models={"type": "array"}),
        "OpenAPI": _object(["openapi", "paths"], openapi=text, paths={"type": "object"}),
        "Model": _object(
            ["name", "versions", "platform", "inputs", "outputs"],
            name=text, versions={"type": "array", "items": text}, platform=text,
            inputs={"type": "array", "items": described}, outputs={"type": "array", "items": described},
        ),
        "InferenceRequest": _object(
            ["inputs"],
            id=text, inputs={"type": "array", "minItems": 1, "items": tensor},
            parameters=_object([], timeout=timeout, binary_data_output=flag),
            outputs={"type": "array", "items": _object(["name"], name=text, parameters=_object([], binary_data=flag))},
        ),
        "InferenceResponse": _object(
            ["model_name", "model_version", "parameters", "outputs"],
            model_name=text, model_version=text, id=text, outputs={"type": "array", "items": tensor},
            parameters=_object(
                ["members_used", "members_late", "degraded"], members_used=text, members_late=text, degraded=flag
            ),
        ),
    }  # fmt: skip


HTML = b"text/html; charset=utf-8"
PAGE = (Path(__file__).parent / "page.html").read_bytes()
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
JSON = b"application/json"


def pages(
    staffed: Staffed, serving: Serving, inbox: Arena, metrics: Metrics
) -> dict[str, tuple[bytes, Callable[[], bytes]]]:
    """Return the pages by path: (content type, a function that returns the body)."""
    return {
        "/": (HTML, lambda: PAGE),
        "/status": (JSON, lambda: orjson.dumps(status(staffed, serving, inbox, metrics))),
        "/metrics": (TEXT, lambda: _metrics(staffed, metrics)),
        "/openapi.json": (JSON, lambda: orjson.dumps(openapi_document(staffed.ensemble, serving))),
    }


def status(staffed: Staffed, serving: Serving, inbox: Arena, metrics: Metrics) -> dict[str, Any]:
    """Return the numbers that the page shows."""
    now, members = time.monotonic(), []
    for name, member in staffed.ensemble.members.items():
        members.append(
            {
                "name": name,
                "pid": None if member.process is None else member.process.pid,
                "state": member.state if member.state != "up" else member.breaker.state(now),
                "proven": member.batcher.proven,
                "runtime": member.runtime,
                "batched": member.batcher.batched,
                "row_ms": round(member.batcher.times.pace.expected(1) * 1e3, 3),
                "waiting": member.batcher.waiting,
                "computing": sum(len(flight.works) for flight in member.batcher.in_flight.values()),
                "batches": member.batcher.counts.batches,
                "rows": member.batcher.counts.rows,
                "late": member.batcher.counts.late,
                "lost": member.batcher.counts.lost,
                "restarts": member.restarts,
            }
        )
    return {
        "replication": staffed.replication,
        "deadline_ms": serving.deadline * 1e3,
        "inbox_bytes": inbox.nbytes - inbox.free,
        "quorum": staffed.ensemble.quorum,
        "members": members,
        **metrics.summary(),
    }


def _metrics(staffed: Staffed, metrics: Metrics) -> bytes:
    now = time.monotonic()
    for name, member in staffed.ensemble.members.items():
        up = member.state == "up" and member.breaker.state(now) == "closed"
        for gauge, value in (
            (metrics.restarts, member.restarts),
            (metrics.queued, member.batcher.waiting),
            (metrics.up, int(up)),
            (metrics.batches, member.batcher.counts.batches),
            (metrics.rows, member.batcher.counts.rows),
            (metrics.slowdown, member.batcher.times.slowdown),
        ):
            metrics.of(gauge, name).set(value)
    return metrics.text()
