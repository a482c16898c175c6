"""What an interrupt tells from the handler of its signal, whatever the program was doing."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from apportion.errors import ToldToEnd
from apportion.runtime.notice import explain


def test_a_progress_bar_that_holds_its_lock_does_not_hold_up_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w") as stream, open(read) as told:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(console=Console(file=stream, force_terminal=True), auto_refresh=False) as progress:
            assert sys.stderr is not stream  # the bar stands in for it
            taken, over = threading.Event(), threading.Event()

            def hold() -> None:
                with progress.live._lock:  # as the thread that draws the bar does, while it waits for the console
                    taken.set()
                    over.wait(60)

            holder = threading.Thread(target=hold)
            holder.start()
            assert taken.wait(30)
            teller = threading.Thread(
                target=explain, args=(ToldToEnd(signal.SIGHUP, "told"), "saved at step 7"), daemon=True
            )
            teller.start()
            teller.join(10)
            waits = teller.is_alive()
            over.set()
            holder.join(30)
        assert not waits
        monkeypatch.undo()
        stream.close()
        assert "saved at step 7\n" in told.read()


def test_a_stream_without_a_file_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    explain(ToldToEnd(signal.SIGTERM, "told"), "saved at step 7")
    assert stream.getvalue() == "saved at step 7\n"


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO())])
def test_a_stream_that_is_gone_raises_nothing(stream: io.TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    explain(ToldToEnd(signal.SIGTERM, "told"), "saved at step 7")
