"""Both sides of `dev bench serve`: their checkpoints, their servers, and one client of both."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from benchmarks.harness import shapes
from benchmarks.harness.checkpoints import expanded, made, make
from benchmarks.harness.sides import OF_PEERS, Say, SideFailed, python_path
from unfreeze.checkpoint.manifest import read_json

SPREAD = 3  # the longest answer over the shortest
LOADED, ANSWERED = 300.0, 1800.0  # seconds that a server has to be ready, and a client for all its answers
ENDED = 20.0  # seconds that a server has to end
SHOWN = 600  # last characters of a server's output in an error
COMMANDS = {"unfreeze": ("unfreeze", "serve"), "transformers": ("transformers.cli.transformers", "serve")}


def checkpoint(folder: str | Path, model: str, layers: int) -> dict[str, Path]:
    """Make a model of random weights. -> side -> folder; transformers' has experts expanded to bf16.

    Words are t0, t1 …, one for each id; none ends an answer.
    """
    root = Path(folder)
    if model == "dense":
        config = shapes.qwen("qwen3", shapes.QWEN3_06B | {"num_hidden_layers": layers})
        folders = dict.fromkeys(COMMANDS, made(root / model, without_ends(config)))
    else:
        config = without_ends(read_json(shapes.TINY_K2 / "config.json") | {"model_type": "deepseek_v3"})
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        folders = {"unfreeze": made(root / model, config), "transformers": root / f"{model}-expanded"}
        if not (folders["transformers"] / "config.json").is_file():
            make(folders["transformers"], plain, expanded)
    for each in folders.values():
        _words(each)
    return folders


def without_ends(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without the ids that end an answer."""
    return config | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _words(folder: Path) -> None:
    """Write a tokenizer of as many words as the model has ids."""
    size = read_json(folder / "config.json")["vocab_size"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(size)}, "t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@dataclass(frozen=True)
class Load:
    """Requests of a client: prompts in words, the tokens of each answer, and how many at once."""

    prompts: Sequence[str]
    lengths: Sequence[int]
    streams: int

    @classmethod
    def draw(cls, requests: int, prompt: int, longest: int, streams: int, folder: Path) -> Load:
        """Lengths are drawn evenly from a third of the longest to the longest."""
        draw = random.Random(requests * 100_003 + longest)
        vocab_size = read_json(folder / "config.json")["vocab_size"]
        prompts = [" ".join(f"t{draw.randrange(vocab_size)}" for _ in range(prompt)) for _ in range(requests)]
        lengths = [draw.randint(-(-longest // SPREAD), longest) for _ in range(requests)]
        return cls(prompts, lengths, streams)


@dataclass
class Server:
    """A server's process on loopback. flags: of its command; seconds: of each timed load."""

    side: str
    model: Path
    flags: Sequence[str] = ()
    threads: int = 0
    seconds: list[float] = field(default_factory=list[float])

    @contextmanager
    def running(self) -> Generator[str]:
        """Start it and wait until it is ready. -> its address. Raises SideFailed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        module, command = COMMANDS[self.side]
        environment = os.environ | {"PYTHONPATH": python_path()}
        environment |= {} if self.side == "unfreeze" else OF_PEERS
        environment |= {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        words = [sys.executable, "-m", module, command, str(self.model), "--port", str(port), *self.flags]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
            try:
                self._wait(process, output, f"http://127.0.0.1:{port}")
                yield f"http://127.0.0.1:{port}"
            except httpx.HTTPError as error:
                raise SideFailed(f"{self.side}: {error!r}; {_end(output)}") from None
            finally:
                process.terminate()
                try:
                    process.wait(ENDED)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _wait(self, process: subprocess.Popen[bytes], output: Any, url: str) -> None:
        """Return once it has answered a request of one token."""
        until = time.monotonic() + LOADED
        while time.monotonic() < until and process.poll() is None:
            try:
                reply = httpx.post(f"{url}/v1/completions", json=self.request("t1", 1, False), timeout=LOADED)
            except httpx.TransportError:
                time.sleep(0.3)
                continue
            if reply.status_code == 200:
                return
            if reply.status_code != 503 or self.side != "unfreeze":
                raise SideFailed(f"{self.side} answered {reply.status_code}: {reply.text[:SHOWN]}")
            time.sleep(0.3)
        raise SideFailed(f"{self.side} is not ready: {_end(output)}")

    def request(self, prompt: str, length: int, stream: bool) -> dict[str, Any]:
        """Return the body of a request; transformers knows no stream_options and always sends the usage."""
        name = self.model.name if self.side == "unfreeze" else str(self.model)
        body = {"model": name, "prompt": prompt, "max_tokens": length, "temperature": 0.0, "stream": stream}
        return body | (
            {"stream_options": {"include_usage": True}} if stream and self.side == "unfreeze" else {}
        )

    def round(self, load: Load) -> float:
        """Start it, warm it up, answer the load. -> tokens a second.

        The prompts of the warm-up are others (backwards), so that none of the load is in a cache already.
        """
        others = [" ".join(reversed(prompt.split())) for prompt in load.prompts[: load.streams]]
        warm = Load(others, [4] * load.streams, load.streams)
        with self.running() as url:
            asyncio.run(self._answers(url, warm))
            started = time.perf_counter()
            counts = asyncio.run(self._answers(url, load))
            self.seconds.append(time.perf_counter() - started)
        if counts != list(load.lengths):
            raise SideFailed(f"{self.side} made answers of {counts[:8]} tokens, not {load.lengths[:8]}")
        return sum(counts) / self.seconds[-1]

    async def _answers(self, url: str, load: Load) -> list[int]:
        """Ask for all answers, `streams` at once. -> tokens of each, as its usage says."""
        gate = asyncio.Semaphore(load.streams)
        limits = httpx.Limits(max_connections=load.streams)
        async with httpx.AsyncClient(base_url=url, timeout=ANSWERED, limits=limits) as client:

            async def one(prompt: str, length: int) -> int:
                tokens = 0
                async with (
                    gate,
                    client.stream(
                        "POST", "/v1/completions", json=self.request(prompt, length, True)
                    ) as reply,
                ):
                    reply.raise_for_status()
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            tokens = _used(json.loads(line[6:])) or tokens
                return tokens

            return await asyncio.gather(*map(one, load.prompts, load.lengths))

    def speed(self, load: Load) -> float:
        """Return tokens a second, the median of the rounds."""
        return sum(load.lengths) / statistics.median(self.seconds)

    def results(self, load: Load) -> dict[str, Any]:
        """Return tokens a second: the median of the rounds, the fastest and the slowest."""
        total = sum(load.lengths)
        fastest, slowest = total / min(self.seconds), total / max(self.seconds)
        return {"served_per_second": self.speed(load), "fastest": fastest, "slowest": slowest}


def _used(event: Mapping[str, Any]) -> int:
    return (event.get("usage") or {}).get("completion_tokens", 0)


def _end(output: Any) -> str:
    """The last lines of a server's output."""
    output.seek(0)
    return output.read().decode("utf-8", "replace")[-SHOWN:]


def take_turns(sides: tuple[Server, Server], load: Load, rounds: int, say: Say) -> None:
    """Time rounds of both: A B, B A, A B …"""
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            say(f"{side.side}, {load.streams} streams: {side.round(load):.1f} tokens/s")


def fastest(
    folder: Path, ways: Sequence[str], load: Load, threads: int, say: Say
) -> tuple[str, dict[str, str]]:
    """Try each way to start transformers' server, with one answer a stream. -> the fastest; results.

    Raises SideFailed if none works.
    """
    short = Load(load.prompts[: load.streams], load.lengths[: load.streams], load.streams)
    speeds: dict[str, float] = {}
    results: dict[str, str] = {}
    for way in ways:
        try:
            speeds[way] = Server("transformers", folder, way.split(), threads).round(short)
            results[way] = f"{speeds[way]:.1f} tokens/s"
        except SideFailed as error:
            results[way] = str(error)[-SHOWN:]
        say(f"transformers serve {way}: {results[way]}")
    if not speeds:
        raise SideFailed(f"transformers serve: {results}", next='pip install "transformers[serving]"')
    return max(speeds, key=lambda way: speeds[way]), results
