"""A port or a socket file of this machine, and a router behind it in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import uvicorn

from unfreeze.core.errors import ConfigError
from unfreeze.serve.router import Router

HOST = "127.0.0.1"
PATIENCE = 5.0  # seconds for open connections to end
BACKLOG = 1024


class Endpoint:
    """Listens at once; requests that come before `serve` wait for it.

    port         0: a free one
    socket_file  also a Unix socket there: it is reached from processes without a network

    Raises ConfigError if the port is in use.
    """

    def __init__(self, *, port: int = 0, socket_file: Path | None = None):
        self._sockets = [_listening(port)]
        self.port: int = self._sockets[0].getsockname()[1]
        if socket_file is not None:
            local = socket.socket(socket.AF_UNIX)
            local.bind(str(socket_file))
            local.listen(BACKLOG)
            self._sockets.append(local)
        self.router: Router | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://{HOST}:{self.port}"

    def session_url(self, session: str) -> str:
        """The base_url of a session."""
        return f"{self.url}/s/{session}/v1"

    def serve(self, router: Router) -> Endpoint:
        """Answer requests until `close`."""
        config = uvicorn.Config(
            router.app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.router, self._server = router, uvicorn.Server(config)
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


def _listening(port: int) -> socket.socket:
    result = socket.socket(socket.AF_INET)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind((HOST, port))
    except OSError as error:
        result.close()
        raise ConfigError(
            f"port {port}: {error.strerror or error}", next="leave the port out: a free one"
        ) from None
    result.listen(BACKLOG)
    return result
