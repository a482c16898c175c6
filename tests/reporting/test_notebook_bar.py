"""The bar of a run in a notebook: one output, drawn anew."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from apportion.core.event import Event
from apportion.reporting.progress.display import Display

START = {
    "strategy": "single_device", "launcher": "local", "workers": 1, "threads": 1, "device": "cpu", "parameters": 10,
    "examples": 100, "batch_size": 10, "steps": 50, "steps_per_epoch": 10, "first_step": 0, "resumed": False,
    "proof": None, "frames": 0,
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    output = SimpleNamespace(update=lambda content, raw: found.append(content))
    display = SimpleNamespace(display=lambda *_, **__: output)
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=True), display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


def event(kind: str, step: int, **data: object) -> Event:
    return Event(kind=kind, step=step, epoch=step / 10, seconds=float(step), data=data)  # type: ignore[arg-type]


def test_the_bar_has_the_last_step_and_the_newest_lines(drawn: list[dict[str, str]]) -> None:
    with Display() as display:
        display.show(event("start", 0, **START))
        for step in range(1, 51):
            display.show(event("step", step, values={"loss": [0.5]}, examples_per_second=1000.0))
            display.show(event("evaluation", step, metrics={"<accuracy>": step / 100}, final=False, best=True))
        opened = len(drawn)
    assert len(drawn) == opened + 1
    lines = drawn[-1]["text/plain"].splitlines()
    assert len(lines) == 13
    assert "50 steps" in lines[0]
    assert "0.5000" in lines[-2]
    assert "step 50 of 50" in lines[-1]
    assert "&lt;accuracy&gt;" in drawn[-1]["text/html"]
    assert "<progress" not in drawn[-1]["text/html"]
    assert any("<progress" in content["text/html"] for content in drawn)
    HTMLParser().feed(drawn[-1]["text/html"])
