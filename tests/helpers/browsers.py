"""A real browser, for the pages that people look at."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """Chromium without a window, each time with a fresh profile, and never longer than its deadline."""

    RESOURCE = 101845102
    """What chromium's network log marks the requests with that a page makes, and not chromium itself."""
    QUIET = ("background-networking", "quic", "component-update", "sync", "breakpad", "crash-reporter", "extensions")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked = folder / "asked.json"

    def __call__(self, *arguments: str, seconds: float = 60) -> str:
        """What it prints."""
        home = self._folder / "home"
        shutil.rmtree(home, ignore_errors=True)
        assert BROWSER is not None
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += [f"--disable-{what}" for what in self.QUIET]
        command += [
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={home}",
            f"--log-net-log={self._asked}",
        ]
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "HOME": str(self._folder)},
        )
        try:
            return process.communicate(timeout=seconds)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def asked_for(self) -> set[str]:
        """The addresses, of anything but files, that the page asked for the last time."""
        found = re.findall(rf'"traffic_annotation":{self.RESOURCE},"url":"([^"]*)"', self._asked.read_text())
        return {address for address in found if not address.startswith("file:")}
