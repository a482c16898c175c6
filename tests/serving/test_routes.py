"""The routes of the server: what is answered without a member, and how many requests are answered at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apportion.serving.config import Serving
from apportion.serving.ensemble.ensemble import Ensemble
from apportion.serving.http.host_names import Hosts
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import Response
from apportion.serving.http.routes import App, InferCall
from apportion.serving.metrics import Metrics
from apportion.serving.pool.frames import Arena
from apportion.serving.runtimes.runtime import Spec

INFER = Head("POST", "/v2/models/m1/infer", keep_alive=True, length=2)


@pytest.fixture
def app() -> Iterator[App]:
    """The routes of a server that answers three requests at once, and whose member is not asked in these tests."""
    member: Any = object()
    specs = {"m1": ((Spec("input", "FP32", (None, 8)),), (Spec("output", "FP32", (None, 3)),))}
    inbox = Arena(1 << 20)
    yield App(
        Ensemble({"m1": member}, 1, specs=specs), Serving(most_requests=3), inbox, Metrics(),
        version="1", pages={}, hosts=Hosts("127.0.0.1", "127.0.0.1"),
    )  # fmt: skip
    inbox.close()


def asked(app: App) -> InferCall:
    call = app.opened(INFER)
    assert isinstance(call, InferCall)
    return call


def in_a_loop(run: Callable[[], None]) -> None:
    async def ran() -> None:
        run()

    asyncio.run(ran())


def test_one_request_more_than_are_answered_at_once_is_to_come_again(app: App) -> None:
    def run() -> None:
        calls = [asked(app) for _ in range(3)]
        refused = app.opened(INFER)
        assert isinstance(refused, Response)
        assert refused.status == 429
        assert "3 requests are being answered already" in json.loads(refused.body)["error"]
        calls[1].abandon()
        calls[1] = asked(app)
        assert isinstance(app.opened(INFER), Response)

    in_a_loop(run)


def test_a_request_that_is_over_takes_no_place_of_another(app: App) -> None:
    def run() -> None:
        for number in range(10):
            call, answers = asked(app), list[Response]()
            if number % 2:
                call.abandon()
            else:
                call.body_received(memoryview(b"{}"), None, answers.append)
                assert [answer.status for answer in answers] == [400]
        assert app.busy == 0

    in_a_loop(run)


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("POST", "/v2", b"GET, HEAD"), ("GET", "/v2/models/m1/infer", b"POST")]
)
def test_another_method_is_answered_with_those_that_are_allowed(
    app: App, method: str, path: str, allowed: bytes
) -> None:
    found = app.opened(Head(method, path, keep_alive=True))
    assert isinstance(found, Response)
    assert (found.status, [*found.headers]) == (405, [(b"allow", allowed)])
    assert json.loads(found.body)["error"].startswith(f"{path} is asked for with ")
