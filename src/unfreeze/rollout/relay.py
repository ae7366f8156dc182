"""One port of the machine's loopback for a process without a network: through a socket file.

A network namespace has a loopback of its own, on which nobody listens. A process beside the grader's listens
there on the same port, and passes every connection on to a Unix socket, which namespaces do not divide. So
the grader's process reaches this one service, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress

from unfreeze.rollout.limits import end_with_parent

SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # netdevice(7)
CHUNK = 2**16
BACKLOG = 256


def start(port: int, socket_file: str) -> None:
    """Listen on the port in this process's network namespace, in a child that ends with this process."""
    _loopback_up()
    listening = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    if os.fork() == 0:
        try:
            end_with_parent()
            keep = listening.fileno()  # the others are the grader's: its end must be seen
            os.closerange(3, keep)
            os.closerange(keep + 1, 1024)
            asyncio.run(_serve(listening, socket_file))
        finally:
            os._exit(0)
    listening.close()


def _loopback_up() -> None:
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


async def _serve(listening: socket.socket, socket_file: str) -> None:
    async def link(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        try:
            far, to_far = await asyncio.open_unix_connection(socket_file)
        except OSError:  # the run has ended
            to_near.close()
            return
        await asyncio.gather(_pump(near, to_far), _pump(far, to_near))

    server = await asyncio.start_server(link, sock=listening)
    await server.serve_forever()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await source.read(CHUNK):
            target.write(chunk)
            await target.drain()
    with suppress(OSError):
        target.close()
