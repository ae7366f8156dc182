"""The address of an OpenAI-compatible server: what it may be, whose it is, and how its faults are said.

The standard library alone: a recipe asks `is_url` before anything heavy is imported.
"""

from __future__ import annotations

import ipaddress
from importlib import import_module
from urllib.parse import urlsplit

from unfreeze.core.errors import ConfigError, UserError

KEY = "OPENAI_API_KEY"
"""The environment variable with the key, which is written nowhere, and sent by https or to this machine."""
WORDS = 300  # characters of a server's own words that are shown


class EndpointError(UserError):
    """A server that doesn't answer, refuses, or answers what cannot be.

    status: of its answer; None where there was none.
    """

    def __init__(self, message: str, *, next: str = "", status: int | None = None):
        super().__init__(message, next=next)
        self.status = status


def refuse_without_library(url: str) -> None:
    """Raise ConfigError where the library that asks servers is not installed."""
    try:
        import_module("openai")  # an extra, and a second
    except ImportError:
        raise ConfigError(
            f"{url}: a server is asked with the library openai (extra [teach]), which is not installed",
            next="pip install openai",
        ) from None


def refuse_while_training(url: str, *, prepare: str | None) -> None:
    """Raise ConfigError unless answers are only prepared: a server is too slow to ask at every step."""
    if not prepare:
        raise ConfigError(
            f"{url} is a server, and a teacher that is a server is asked before training, not during it",
            next="add --prepare FOLDER; then train with --teacher FOLDER",
        )
    refuse_without_library(url)


def is_url(name: str) -> bool:
    """Whether a model's or teacher's name is a server's address."""
    return name.startswith(("http://", "https://"))


def base_url(url: str) -> str:
    """The address without a closing slash, with /v1 where it has no path.

    Raises ConfigError for one without a host, and for one with a name, a password or a query: it would stand
    in records and messages.
    """
    try:
        parts = urlsplit(url)
        port = parts.port  # a number within its range, or ValueError
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}", next="http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server", next="http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "a server's address has no name, password or query: it stands in records and messages",
            next=f"the address alone; a key comes from the environment variable {KEY}",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"


def is_here(url: str) -> bool:
    """Whether the address is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_network(url: str) -> bool:
    """Whether the address is of this machine or of a private network: nobody sends a bill for it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:  # a name: without a dot, or under a suffix that is never delegated
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".localhost"))
