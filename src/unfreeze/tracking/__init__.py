"""Trackers: sinks that receive the run's events as they are written.

events.jsonl is always written; a sink copies it for another program.

There is one file per sink, each with a class `Sink(run_dir, config)`. It imports its library when
constructed, opens at the first event and is closed at the end. `scalars` and `texts` decide here, for all
sinks, what they show of an event.
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
from unfreeze.report.curves import measure_name
from unfreeze.report.events import number, numbers

SINKS = {
    "tensorboard": "unfreeze.tracking.tensorboard",
    "wandb": "unfreeze.tracking.wandb",
    "trackio": "unfreeze.tracking.trackio",
}
"""Name (also of the package to install) -> module."""


class Sink(Protocol):
    """Interface of a tracker. Every method may raise; Tracked makes sure that training continues."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Import the library, but open nothing yet. Raises ImportError if it isn't installed."""

    def open(self, step: int) -> None:
        """Called at the first event.

        step > 0: the run resumes from there; anything shown for later steps is obsolete.
        """

    def log(self, event: Event) -> None:
        """Record one event."""

    def close(self, done: bool) -> None:
        """Flush and close. done: the run finished, or was interrupted and saved; False: it failed."""


class Tracked:
    """Event listener around a sink.

    The first exception disables the sink and becomes one warning event; training never stops for it.
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
            return f"{self._fault(error)}; training continues, and events.jsonl has everything"
        self._done |= event["kind"] == "end"
        return None

    def close(self) -> None:
        """Close the sink, also a failed one if possible.

        The event log is closed by now, so a failure here is a line on stderr.
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
    """Create the sinks of a run as event listeners, and close them at the end.

    Raises ConfigError before any work if a library is missing.
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
    """Numbers of a train, eval, score or stream event, by the names that trackers show:

    train/loss, eval/perplexity, score/rows:test.jsonl, exact, stream/hidden, experts/dead/layer 3.
    """
    if event["kind"] == "score":
        return {} if event["value"] is None else {f"score/{measure_name(event)}": event["value"]}
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
    """Texts of an event by the names that trackers show: sample/0 before, warning, data, plan."""
    by_name = {}
    if warning := event.get("warning"):
        by_name["warning"] = warning
    if event["kind"] == "warning":
        by_name["warning"] = event.get("message", "")
    elif event["kind"] == "sample":
        prompt, text = event.get("prompt", ""), event.get("text", "")
        by_name[f"sample/{event.get('index', prompt[:40])} {event.get('when', '')}"] = f"{prompt}\n\n{text}"
    elif event["kind"] == "data":
        by_name["data"] = event.get("summary", "")
    elif event["kind"] == "plan":
        by_name["plan"] = "\n".join(event.get("lines", []))
    elif event["kind"] == "train" and (error := event.get("error")):
        by_name["error"] = error
    return by_name
