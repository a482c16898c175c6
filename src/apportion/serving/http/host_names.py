"""The names by which clients may address this server.

A page of another site can have its own name resolved to this machine (DNS rebinding) and then read every answer, since
to the browser it is one site; or it can send requests without reading the answers. In both cases the request gives the
other site's name, in ``Host`` or ``Origin``, and is refused here.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from apportion.serving.http.request_head import Head
from apportion.serving.http.response import HTTPError

ANY = "*"
"""The name that stands for all names: nothing is checked."""
MOST_KNOWN = 1000
"""The number of header values of which it is remembered that they are permitted."""
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\[\]:/@?#\s]+)(?::\d{0,5})?", re.ASCII)


class Hosts:
    """The names that requests may be sent to. ``listened``: the address that is listened at, as it was given.
    ``bound``: as the socket gives it. ``names``: others by which the server is known."""

    def __init__(self, listened: str, bound: str, names: Sequence[str] = ()) -> None:
        own = socket.gethostname()
        self._names = {name.lower().rstrip(".") for name in ("localhost", own, own.partition(".")[0], listened, *names)}
        self._names.add(f"{own.partition('.')[0]}.local".lower())
        self._any = ANY in names
        self._bound = _address(bound)
        self._known: set[bytes] = set()

    def check(self, head: Head) -> None:
        """Raise HTTPError (403) where the request was sent to another name, or by a page of another site."""
        if head.host is not None and head.host not in self._known:
            self._check(head.host, head.host.decode("latin-1"), "host", "")
        if head.origin is not None and head.origin not in self._known:
            scheme, _, authority = head.origin.decode("latin-1").partition("://")
            self._check(head.origin, authority if scheme in ("http", "https") else "", "origin", f"{scheme}://")

    def _check(self, value: bytes, authority: str, header: str, scheme: str) -> None:
        found = _AUTHORITY.fullmatch(authority)
        if not self._any and (found is None or not self._permitted(found["name"])):
            cure = "start the server with --host and that name besides the address"
            raise HTTPError(403, f"{header} {(scheme + authority)[:80]!r} is not a name of this server: {cure}")
        if len(self._known) < MOST_KNOWN:
            self._known.add(value)

    def _permitted(self, name: str) -> bool:
        if name.lower().rstrip(".") in self._names:
            return True
        address = _address(name.strip("[]"))
        if address is None:
            return False
        if address.is_loopback or address == self._bound:
            return True
        # Who asks for an address asks this machine: only a name can be made to mean another one.
        return self._bound is not None and self._bound.is_unspecified


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
