"""The address of an OpenAI-compatible server: valid forms, its network, and its error messages.

Uses only the standard library: a recipe calls `is_url` before anything heavy is imported.
"""

from __future__ import annotations

import ipaddress
import socket
from importlib import import_module
from urllib.parse import urlsplit

from unfreeze.core.errors import ConfigError, UserError

KEY = "OPENAI_API_KEY"
"""Environment variable of the key. It is never written, and sent only by https or to this machine."""
WORDS = 300  # maximum characters of a server's message to show


class EndpointError(UserError):
    """A server that doesn't answer, refuses, or sends an invalid answer.

    status: HTTP status of its answer; None if there was none. late: no whole answer in time, at each try.
    unheard: no connection, at each try.
    """

    def __init__(
        self,
        message: str,
        *,
        next: str = "",
        status: int | None = None,
        late: bool = False,
        unheard: bool = False,
    ):
        super().__init__(message, next=next)
        self.status, self.late, self.unheard = status, late, unheard


def refuse_without_library(url: str) -> None:
    """Raise ConfigError if the client library is not installed."""
    try:
        import_module("openai")  # optional dependency; importing takes a second
    except ImportError:
        raise ConfigError(
            f"{url}: queries need the library openai (extra [teach]), which is not installed",
            next="pip install openai",
        ) from None


def refuse_unheard(url: str) -> None:
    """Raise ConfigError if nothing listens at an address of this machine. Others may need a proxy."""
    parts = urlsplit(url)
    if not is_here(url):
        return
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"no server listens at {url}: {error.strerror or error}", next="start it, or correct the address"
        ) from None


def refuse_while_training(url: str, *, prepare: str | None) -> None:
    """Raise ConfigError unless answers are only prepared: a server is too slow to query at every step."""
    if not prepare:
        raise ConfigError(
            f"{url} is a server; it must be queried before training, not during it",
            next="add --prepare FOLDER; then train with --teacher FOLDER",
        )
    refuse_without_library(url)


def is_url(name: str) -> bool:
    """Return True if a model's or teacher's name is a server's address."""
    return name.startswith(("http://", "https://"))


def base_url(url: str) -> str:
    """Return the address without a trailing slash, with /v1 added if it has no path.

    Raises ConfigError for an address without a host, or with a user name, a password or a query, because it
    would appear in records and messages.
    """
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError if out of range
    except ValueError as error:
        raise ConfigError(
            f"{url!r} is not a valid address: {error}", next="http://127.0.0.1:8000/v1"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the address of a server", next="http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "a server's address must not have a name, password or query: it appears in records and messages",
            next=f"give only the address; put the key in the environment variable {KEY}",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"


def is_here(url: str) -> bool:
    """Return True if the address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_network(url: str) -> bool:
    """Return True if the address is on this machine or a private network, where nobody bills for it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:  # a name: without a dot, or under a suffix that is never delegated
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".localhost"))
