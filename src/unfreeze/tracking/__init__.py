"""Sinks: trackers that read the run's events as they are written.

events.jsonl is always there; a sink is a copy for another program.

One file per sink, a class `Sink(run_dir, config)` each: it imports its library when it is made and touches
nothing else, opens at the first event and is closed at the end. What they all show is decided once, here:
`scalars` and `texts` of an event.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from unfreeze.core.errors import ConfigError
from unfreeze.core.schema import Event
from unfreeze.report.events import number, numbers

SINKS = {
    "tensorboard": "unfreeze.tracking.tensorboard",
    "wandb": "unfreeze.tracking.wandb",
    "trackio": "unfreeze.tracking.trackio",
}
"""Name, which is also that of the package to install -> module."""


class Sink(Protocol):
    """What a tracker needs. Any of these may raise; Tracked sees to it that training goes on."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Import the library, open nothing yet. Raises ImportError where it isn't installed."""

    def open(self, step: int) -> None:
        """Called at the first event.

        step > 0: the run goes on from there, and what was shown of later steps doesn't count.
        """

    def log(self, event: Event) -> None:
        """One event."""

    def close(self, done: bool) -> None:
        """Flush and end. done: the run reached its end, or was interrupted and saved; False: it failed."""


class Tracked:
    """An event listener around a sink.

    The first exception shuts the sink and is said once, as a warning event; training never stops for it.
    """

    def __init__(self, name: str, sink: Sink):
        self.name, self.sink = name, sink
        self._open, self._failed, self._done = False, False, False

    def __call__(self, event: Event) -> str | None:
        if self._failed:
            return None
        try:
            if not self._open:
                self.sink.open(event["step"])
                self._open = True
            self.sink.log(event)
        except Exception as error:
            self._failed = True
            return f"{self._fault(error)}; training goes on, and events.jsonl has everything"
        self._done |= event["kind"] == "end"
        return None

    def close(self) -> None:
        """End the sink; a failed one too, as far as it goes.

        The events are closed by now, so a failure here is a line on stderr.
        """
        if not self._open:
            return
        try:
            self.sink.close(self._done)
        except Exception as error:
            if not self._failed:
                print(f"warning: {self._fault(error)}; events.jsonl has everything", file=sys.stderr)

    def _fault(self, error: Exception) -> str:
        return f"track {self.name} failed: {type(error).__name__}: {str(error).strip() or 'no message'}"


@contextmanager
def tracking(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> Iterator[tuple[Tracked, ...]]:
    """The sinks of a run as event listeners, closed at the end.

    Raises ConfigError for one whose library is absent, before any work.
    """
    tracked = tuple(Tracked(name, _made(name, run_dir, config)) for name in dict.fromkeys(names))
    try:
        yield tracked
    finally:
        for sink in tracked:
            sink.close()


def _made(name: str, run_dir: Path, config: Mapping[str, Any]) -> Sink:
    try:
        return importlib.import_module(SINKS[name]).Sink(run_dir, config)
    except ImportError as error:
        raise ConfigError(
            f'track = "{name}" needs the package {name}, which cannot be imported: {error}',
            next=f"pip install {name}",
        ) from error


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a train, eval or stream event under the names that trackers show.

    train/loss, eval/perplexity, stream/hidden, experts/dead/layer 3.
    """
    if event["kind"] not in ("train", "eval", "stream"):
        return {}
    values = {f"{event['kind']}/{name}": value for name, value in numbers(event).items()}
    if event["kind"] == "train":
        tokens, seconds = event.get("tokens"), event.get("seconds")
        if tokens and seconds:
            values["train/tokens_per_second"] = tokens / seconds
        for layer, balance in event.get("expert_balance", {}).items():
            named = ((name, number(value)) for name, value in balance.items())
            values |= {f"experts/{name}/layer {layer}": size for name, size in named if size is not None}
    return values


def texts(event: Event) -> dict[str, str]:
    """The sentences of an event under the names that trackers show: sample/0 before, warning, data, plan."""
    found = {}
    if warning := event.get("warning"):
        found["warning"] = warning
    if event["kind"] == "warning":
        found["warning"] = event.get("message", "")
    elif event["kind"] == "sample":
        prompt, text = event.get("prompt", ""), event.get("text", "")
        found[f"sample/{event.get('index', prompt[:40])} {event.get('when', '')}"] = f"{prompt}\n\n{text}"
    elif event["kind"] == "data":
        found["data"] = event.get("summary", "")
    elif event["kind"] == "plan":
        found["plan"] = "\n".join(event.get("lines", []))
    elif event["kind"] == "train" and (error := event.get("error")):
        found["error"] = error
    return found
