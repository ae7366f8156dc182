"""A port or a socket file of this machine, and a service behind it in a thread of its own."""

from __future__ import annotations

import resource
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import uvicorn

from unfreeze.core.errors import ConfigError
from unfreeze.serve.connection import HEAD_BYTES, KEPT, Patience, connection
from unfreeze.serve.router import Router
from unfreeze.serve.service import Service

HOST = "127.0.0.1"
PATIENCE = 5.0  # seconds for open connections to end
BACKLOG = 2048
FILES = 8192  # descriptors: one for each connection
SENT = 262_144  # bytes of the kernel's buffer for what a client has not taken


class Endpoint:
    """Listens at once; requests that come before `serve` or `open` wait for it.

    port         0: a free one
    socket_file  also a Unix socket there: it is reached from processes without a network
    host         an address of this machine

    Raises ConfigError if the port is in use, or the address is none of this machine.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        socket_file: Path | None = None,
        host: str = HOST,
        patience: Patience | None = None,
    ):
        self._sockets = [_listening(host, port)]
        self.host, self.patience = host, patience or Patience()
        self.port: int = self._sockets[0].getsockname()[1]
        if socket_file is not None:
            local = socket.socket(socket.AF_UNIX)
            local.bind(str(socket_file))
            local.listen(BACKLOG)
            self._sockets.append(local)
        self.service: Service | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address without a path."""
        host = {"0.0.0.0": HOST, "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def router(self) -> Router | None:
        """The router, once there is one."""
        return self.service.router if self.service else None

    def session_url(self, session: str) -> str:
        """The base_url of a session."""
        return f"{self.url}/s/{session}/v1"

    def serve(self, router: Router) -> Endpoint:
        """Answer requests by this router until `close`."""
        service = Service()
        service.ready(router)
        return self.open(service)

    def open(self, service: Service) -> Endpoint:
        """Answer requests by a service, which may still be loading, until `close`."""
        more_files()
        config = uvicorn.Config(
            service,  # type: ignore[arg-type]  # an ASGI application by duck typing
            http=connection(self.patience),
            loop="asyncio",
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=KEPT,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        self.service, self._server = service, uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="unfreeze-router", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def close(self) -> None:
        """End the router, then its speaker."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(PATIENCE)
        for each in self._sockets:
            each.close()
        if self.router is not None:
            self.router.speaker.close()

    def _run(self) -> None:
        assert self._server is not None
        self._server.run(sockets=self._sockets)


def more_files() -> None:
    """Allow this process FILES descriptors, or as many as it may have: the usual 1,024 are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"host {host!r} is not an address", next=f"--host {HOST}") from None
    result = socket.socket(family, kind)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT)
    try:
        result.bind(address)
    except OSError as error:
        result.close()
        raise ConfigError(
            f"port {port}: {error.strerror or error}", next="leave the port out: a free one"
        ) from None
    result.listen(BACKLOG)
    return result
