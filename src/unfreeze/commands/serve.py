"""unfreeze serve MODEL_OR_RUN [more …]: answer OpenAI's clients from this machine.

The first is the base, or a run: then its base and its adapter. Each further one is an adapter of that base,
a run or a folder, under its folder's name; NAME=FOLDER names it otherwise.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.device import Device
from unfreeze.config.parse import Files, Folder, Frozen, ModelName, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_seconds, plural
from unfreeze.job.opening.device import say

if TYPE_CHECKING:
    from unfreeze.serve.gate import Rules
    from unfreeze.serve.running import Endpoint
    from unfreeze.serve.service import Service

PORT = 8642
KEY = "UNFREEZE_API_KEY"
SHORTEST = 16  # characters of a key
MAKE_KEY = "python -c 'import secrets; print(secrets.token_urlsafe(32))' > key.txt"


class Config(Frozen):
    models: Annotated[Files, Positional, arg(metavar="MODEL_OR_RUN")] = Field(
        description="checkpoint, run or Hugging Face id; then adapters of the same base"
    )
    port: int = Field(default=PORT, ge=0, le=65_535, description="port; 0: a free one")
    host: str = Field(
        default="127.0.0.1", description="address to listen on; other than this machine's own needs a key"
    )
    api_key_file: Folder = Field(
        default="", description=f"file with a key in each line; empty: {KEY}, if it is set"
    )
    allow_origin: tuple[str, ...] = Field(
        default=(), description="pages of a browser that may ask, such as http://localhost:3000"
    )
    allow_host: tuple[str, ...] = Field(
        default=(), description="further names of this server, such as that of a proxy"
    )
    name: str = Field(default="", description="name of the base for clients; empty: its folder's")
    base: ModelName = Field(
        default="", description="base checkpoint of the first adapter, if the one it names is not here"
    )
    max_rows: int = Field(default=0, ge=0, description="answers sampled at once; 0: as many as memory allows")
    max_waiting: int = Field(default=1024, ge=1, description="requests that may wait; more get 429")
    max_new_tokens: int = Field(
        default=1024, ge=1, description="most tokens of an answer, and as many where a request names none"
    )
    timeout: float = Field(default=600.0, gt=0, description="most seconds of a request")
    drain: float = Field(
        default=30.0, ge=0, description="seconds that running requests have to end after SIGTERM or Ctrl-C"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype. auto: bfloat16 where the hardware has bf16 matmul units"
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C. -> url, models, and the requests by outcome."""
    config = parse(Config, arguments, command="serve", description=__doc__ or "", positional=True)
    for library in ("starlette", "uvicorn"):
        try:
            import_module(library)
        except ImportError:
            raise ConfigError(
                f"serve needs the library {library} (extra [serve]), which is not installed",
                next="pip install starlette uvicorn llguidance",
            ) from None
    keys = keys_of(config, say(common))
    rules = rules_of(config, keys)
    from unfreeze.commands.serve_models import refuse_unknown

    refuse_unknown(config)
    from unfreeze.serve.running import Endpoint
    from unfreeze.serve.service import Service

    try:
        endpoint = Endpoint(port=config.port, host=config.host)
    except ConfigError as error:
        if not error.message.startswith("port "):
            raise
        raise ConfigError(error.message, next=other_port(arguments)) from None
    logging.getLogger("unfreeze.serve").addHandler(_to_stderr())
    service = Service(rules)
    with Signals() as signals:
        endpoint.open(service)
        try:
            return _served(config, endpoint, service, signals, common)
        finally:
            endpoint.close()


def _served(
    config: Config, endpoint: Endpoint, service: Service, signals: Signals, common: Common
) -> dict[str, Any]:
    """Load, answer, drain."""
    from unfreeze.commands.serve_models import opened

    began = time.monotonic()
    tell = say(common)
    tell(f"{endpoint.url}/v1 listens; the model is loading")
    signals.loading = True
    served = opened(config, service, common)
    signals.loading = False
    try:
        names = served.names()
        service.ready(served.router)
        tell(f"ready after {format_seconds(time.monotonic() - began)}: {', '.join(names)}")
        if not common.quiet:
            out = sys.stderr if common.json else sys.stdout
            print(usage(endpoint.url, names[-1], config), file=out, flush=True)
        signals.stop.wait()
        running = len(service.gate.visits)
        some = f"{plural(running, 'request')} may still take {config.drain:g} s; Ctrl-C: at once"
        tell(f"ending: {some if running else 'no request is running'}")
        left = service.drain(config.drain, signals.hurry)
        tell(f"ended; cut off: {plural(left, 'request')}" if left else "ended; every request was answered")
    finally:
        served.close()
    return {"url": f"{endpoint.url}/v1", "models": names, "requests": dict(service.metrics.outcomes)}


class Signals:
    """SIGTERM and Ctrl-C: the first stops the server, a second Ctrl-C hurries.

    While the model is loading, the first ends the process. Former handlers come back at the end of the block.
    """

    def __init__(self) -> None:
        self.stop, self.hurry, self.loading = threading.Event(), threading.Event(), False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _come(self, number: int, frame: object) -> None:
        if self.loading:
            raise SystemExit(0) if number == signal.SIGTERM else KeyboardInterrupt
        if self.stop.is_set() and number == signal.SIGINT:
            self.hurry.set()
        self.stop.set()


def keys_of(config: Config, tell: Callable[[str], None]) -> list[str]:
    """Return the keys: of the file, else of the environment. Raises ConfigError for one that is no secret."""
    if config.api_key_file:
        path = Path(config.api_key_file)
        try:
            text = path.read_text(encoding="utf-8")
            shared = stat.S_IMODE(path.stat().st_mode) & 0o077
        except (OSError, UnicodeDecodeError) as error:
            words = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"api_key_file {path}: {words}", next=MAKE_KEY) from None
        keys, where = text.split(), str(path)
        if not keys:
            raise ConfigError(f"api_key_file {path} is empty", next=MAKE_KEY)
        if shared:
            tell(f"warning: others on this machine may read {path}; chmod 600 {shlex.quote(str(path))}")
    else:
        keys, where = os.environ.get(KEY, "").split(), KEY
    for key in keys:
        if len(key) < SHORTEST or not key.isascii():
            raise ConfigError(
                f"{where}: a key has {len(key)} characters; it must be ASCII and have at least {SHORTEST}",
                next=MAKE_KEY,
            )
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            f"host is {config.host}: others can reach it, so it needs a key",
            next=f"{MAKE_KEY}; then --api-key-file key.txt, or {KEY}",
        )
    return keys


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def rules_of(config: Config, keys: list[str]) -> Rules:
    """Return who may ask. Raises ConfigError for an origin that is none."""
    from unfreeze.serve.gate import Rules, hashed

    for origin in config.allow_origin:
        parts = urlsplit(origin)
        if f"{parts.scheme}://{parts.netloc}" != origin or parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"allow_origin {origin!r} is not the origin of a page",
                next="--allow-origin http://localhost:3000 (each by its name; * is not taken)",
            )
    names = {"127.0.0.1", "localhost", "::1", config.host.strip("[]"), *config.allow_host}
    here = is_loopback(config.host)
    if not here:
        names |= {socket.gethostname(), socket.getfqdn()}
    return Rules(
        hosts=frozenset(name.lower() for name in names),
        any_ip=not here,
        origins=frozenset(config.allow_origin),
        keys=tuple(map(hashed, keys)),
        seconds=config.timeout,
    )


def other_port(arguments: list[str]) -> str:
    """Return the same command with a port that is free."""
    words = list(arguments)
    for i, word in enumerate(words):
        if word == "--port":
            del words[i : i + 2]
            break
        if word.startswith("--port="):
            del words[i]
            break
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return shlex.join(["unfreeze", "serve", *words, "--port", str(port)])


def usage(url: str, model: str, config: Config) -> str:
    """Return lines to copy: for curl and for OpenAI's client."""
    key, python, header = "", "'-'", ""
    if config.api_key_file:
        key = f"$(head -1 {shlex.quote(config.api_key_file)})"
        python = f"open({config.api_key_file!r}).readline().strip()"
    elif os.environ.get(KEY):
        key, python = f"${KEY}", f"os.environ[{KEY!r}]"
    if key:
        header = f' -H "Authorization: Bearer {key}"'
    body = shlex.quote(json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}))
    return (
        f"{url}/v1\n"
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {body}\n"
        f"  client = openai.OpenAI(base_url='{url}/v1', api_key={python})"
    )


def _to_stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
