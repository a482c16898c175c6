"""What this processor does with products of 8-bit numbers, which decides how many bits the weights may have.

Without int8 dot products (VNNI, AMX) x86 adds two products of an unsigned and a signed byte in a signed 16-bit number,
which saturates: 2 * 255 * 127 is more than 32767, and 2 * 255 * 64 is not. Weights of 7 bits are therefore exact
everywhere.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.exporting.onnxruntime_session import session

DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")
"""The flags in /proc/cpuinfo of instructions that add products of bytes in 32 bits, on x86 and on ARM."""
_X86 = ("x86_64", "AMD64", "i386", "i686")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor, as far as int8 is concerned."""

    name: str
    architecture: str
    """What ``platform.machine()`` calls it: "x86_64"."""
    dot_products: tuple[str, ...]
    """Those of ``DOT_PRODUCTS`` that it has."""

    @property
    def saturates(self) -> bool:
        """True where a sum of two products of bytes may be cut off."""
        return self.architecture in _X86 and not self.dot_products

    @property
    def weight_bits(self) -> int:
        """The largest number of bits of weights with which no sum is cut off."""
        return 7 if self.saturates else 8

    def __str__(self) -> str:
        with_them = f"with int8 dot products ({', '.join(self.dot_products)})"
        return f"{self.name} ({self.architecture}), {with_them if self.dot_products else 'without int8 dot products'}"


def this_processor() -> Processor:
    """The processor that this process runs on, by /proc/cpuinfo where there is one."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    return described_processor(text, platform.machine(), platform.processor())


def described_processor(cpuinfo: str, architecture: str, otherwise: str = "") -> Processor:
    """The processor by the text of /proc/cpuinfo. ``otherwise``: its name where that text has none."""
    values: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            values.setdefault(name.strip().lower(), value.strip())
    flags = (values.get("flags") or values.get("features") or "").split()
    name = values.get("model name") or otherwise or "a processor without a name"
    return Processor(
        name=name, architecture=architecture, dot_products=tuple(flag for flag in DOT_PRODUCTS if flag in flags)
    )


TIMES, SECONDS = 60, 1.0
"""The number of times that each file computes an example, and the seconds that it has for that."""


def seconds_each(files: Sequence[Path | bytes], feed: Mapping[str, Any], *, threads: int) -> list[float]:
    """Return the median of the seconds that each file takes for these inputs, with ``threads`` threads."""
    made = [session(file, threads=threads) for file in files]
    taken: list[list[float]] = [[] for _ in made]
    end = time.monotonic() + SECONDS * len(made)
    for turn in range(TIMES):
        for own, one in zip(taken, made, strict=True):
            began = time.perf_counter()
            one.run(None, feed)
            own.append(time.perf_counter() - began)
        if turn and time.monotonic() > end:
            break
    return [statistics.median(own[1:]) for own in taken]
