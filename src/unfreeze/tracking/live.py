"""Live progress on stderr: one bar on a terminal, plain lines elsewhere.

LiveProgress is a listener of core.events.EventLog. Events redraw the bar, never a thread: so nothing redraws
while Ctrl-C is handled, and training shares no lock with it.
Nothing here writes to standard output: with `--json` its last line is the result.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from unfreeze.core.schema import (
    BaselineEvent,
    DataEvent,
    EarlyStopEvent,
    EndEvent,
    EvalEvent,
    Event,
    ForecastEvent,
    LoadEvent,
    PlanEvent,
    ReceiptEvent,
    RolloutEvent,
    SaveEvent,
    ScoreEvent,
    StartEvent,
    TrainEvent,
    WarningEvent,
)
from unfreeze.core.units import format_bytes, format_seconds, plural
from unfreeze.report.baselines import baseline_line
from unfreeze.report.curves import measure_name, score_value
from unfreeze.report.events import COLUMNS, data_line, data_lines, folded, numbers, unreached
from unfreeze.report.forecast import forecast_words
from unfreeze.report.run import decimal_bytes, early_words, load_words
from unfreeze.report.tables import plan_table, receipt_table, receipt_text, receipt_verdict
from unfreeze.report.times import FEW, compiling
from unfreeze.tracking.console import PipeConsole

RATED = 3.0  # seconds of reading before speed and time left are shown
# steps over which tokens/s and time left are averaged: steady, but reacts within seconds
WINDOW = 20


class _Status(ProgressColumn):
    """Text after the bar; cut, not wrapped, on a narrow terminal."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"], no_wrap=True, overflow="ellipsis")


class _Display:
    """A rich bar on a terminal, lines on any other stream, nothing when quiet.

    Closing it always restores the cursor.
    """

    def __init__(self, quiet: bool, stream: TextIO | None):
        self.quiet = quiet
        self.stream = sys.stderr if stream is None else stream
        # do not wrap lines in a file
        self.console = PipeConsole(
            file=self.stream, highlight=False, soft_wrap=not self.stream.isatty(), force_jupyter=False
        )
        self.may_draw = not quiet and self.stream.isatty() and not self.console.is_dumb_terminal
        self.bar: Progress | None = None

    def draw(self, label: str, completed: float, total: float, status: str) -> None:
        if self.bar is None:
            # redirect_stdout=False: results go to stdout and must not pass through this console
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=6 if self.console.width < 80 else 12),
                _Status(),
            )
            self.bar = Progress(
                *columns, console=self.console, auto_refresh=False, redirect_stdout=False, expand=True
            )
            self.bar.add_task(label, total=total, status=status)
            self.bar.start()
        self.bar.update(
            self.bar.task_ids[0],
            description=label,
            completed=completed,
            total=total,
            status=status,
            refresh=True,
        )

    def line(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text))  # as Text, so that square brackets in a file name are not markup

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class LiveProgress:
    """Event listener and context manager that shows loss, tokens/s, memory, time left and step of a run.

    On a terminal, inside `with`, it shows a bar. Elsewhere it prints a line for the first and the last step,
    and one every `seconds_between` seconds. Data, plan, load, receipt, eval, save and warning events are one
    line or table each. `quiet` shows nothing. Leaving the context, also by an exception, restores the
    terminal.
    """

    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        seconds_between: float = 5.0,
        *,
        whole_plan: bool = False,
    ):
        self.total_steps = total_steps
        self._whole_plan = whole_plan
        self._predicted = ""  # words on unmeasured kernels, until shown
        self.seconds_between = seconds_between
        self._display = _Display(quiet, stream)
        self._inside = False
        self._steps = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (tokens, seconds) of the last steps
        self._rolled: list[str] = []  # words on the last rollout
        self._last_line = float("-inf")
        self._beside: dict[str, str] = {}  # metrics on the line besides the loss: field -> name

    def __enter__(self) -> LiveProgress:
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self._display.close()

    def __call__(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None and not self._display.quiet:
            handler(event)
        if warning := event.get("warning"):
            self._display.line(f"warning, step {event['step']}: {warning}")

    def _on_start(self, event: StartEvent) -> None:
        self.total_steps = event.get("steps", self.total_steps)
        live = (metric for metric in event.get("metrics", []) if metric.get("live"))
        self._beside = {
            metric["field"]: metric["label"].lower() for metric in live if metric["field"] != "loss"
        }
        if self._predicted:  # nothing was loaded
            self._display.line(f"preparing step {event['step'] + 1}, {self._predicted}")
            self._predicted = ""
        if event.get("resumed"):
            self._display.line(f"resumed after step {event['step']}")

    def _on_plan(self, event: PlanEvent) -> None:
        if ops := event.get("predicted_kernels"):
            self._predicted = f"{len(ops)} kernel{'s' * (len(ops) > 1)} predicted"
        few = [] if self._whole_plan else event.get("start", [])
        for line in [part for long in few for part in folded(long)] or plan_table(event):
            self._display.line(line)

    def _on_data(self, event: DataEvent) -> None:
        _, *left_out_rows = data_lines([event])
        mixed = [line for words in event.get("mixture", []) for line in folded(f"mixture: {words}")]
        for line in (*folded(f"data: {data_line(event)}"), *mixed, *left_out_rows):
            self._display.line(line)

    def _on_load(self, event: LoadEvent) -> None:
        loaded, first = f"loaded {load_words(event)}; ", f"preparing step {event['step'] + 1}"
        kernels, self._predicted = self._predicted, ""
        once = " (compiles once)" if event.get("compiles") else ""
        whole = f"{loaded}{first}, {kernels}" if kernels else f"{loaded}{first}{once}"
        self._display.line(loaded + kernels if kernels and len(whole) > COLUMNS else whole)

    def _on_receipt(self, event: ReceiptEvent) -> None:
        groups = {name: values for name, values in event.get("groups", {}).items() if values.get("trained")}
        if not groups:
            return
        words = receipt_verdict(event.get("groups", {}), event.get("exceptions", []))
        self._display.line(f"receipt of step {event['step']}: {words}")
        if self._display.may_draw:
            self._display.console.print(receipt_table(groups))
        else:
            self._display.line(receipt_text(groups))

    def _on_eval(self, event: EvalEvent) -> None:
        self._display.line(f"step {event['step']}: {eval_words(event)}")

    def _on_score(self, event: ScoreEvent) -> None:
        self._display.line(f"step {event['step']}: {score_words(event)}")

    def _on_baseline(self, event: BaselineEvent) -> None:
        for line in folded(baseline_line(event)):
            self._display.line(line)

    def _on_forecast(self, event: ForecastEvent) -> None:
        self._display.line(forecast_words(event))

    def _on_save(self, event: SaveEvent) -> None:
        self._display.line(f"step {event['step']}: saved {event.get('path', '')}")

    def _on_early_stop(self, event: EarlyStopEvent) -> None:
        self._display.line(early_words(event))

    def _on_warning(self, event: WarningEvent) -> None:
        self._display.line(f"warning, step {event['step']}: {event.get('message', '')}")

    def _on_end(self, event: EndEvent) -> None:
        self._display.close()
        self._display.line(f"{event.get('reason', 'done')} after step {event['step']}")

    def _on_rollout(self, event: RolloutEvent) -> None:
        self._rolled = rollout_words(event)

    def _on_train(self, event: TrainEvent) -> None:
        self._recent.append((event.get("tokens", 0), event.get("seconds", 0.0)))
        self._steps += 1
        step, status = event["step"], self._status(event)
        if self._inside and self._display.may_draw:
            self._display.draw(f"step {step}/{self.total_steps}", step, self.total_steps, status)
            return
        now = event.get("time", 0.0)
        if now - self._last_line >= self.seconds_between or step == self.total_steps:
            self._last_line = now
            self._display.line(f"step {step}/{self.total_steps}  {status}")

    def _status(self, event: TrainEvent) -> str:
        tokens, seconds = sum(tokens for tokens, _ in self._recent), [taken for _, taken in self._recent]
        # as in the summary: without compiling, which the first step of a process does
        first, compiles = self._steps <= WINDOW, " with compiling" if self._steps < FEW else ""
        trained = sum(seconds) - (compiling(seconds) if first else 0.0)
        loss, peak = event.get("loss"), event.get("peak_bytes")
        timed = seconds[1 if first else 0 :]
        left = (self.total_steps - event["step"]) * sum(timed) / len(timed) if timed else 0.0
        epoch = event.get("epoch")
        values = ((name, event.get(field)) for field, name in self._beside.items())
        beside = [(name, value) for name, value in values if isinstance(value, float)]
        parts = [  # most important first: a narrow terminal cuts the end
            f"epoch {epoch:.1f}" if epoch is not None else "",
            *self._rolled,
            f"loss {loss:.3f}" if loss is not None else "loss not finite",
            *(f"{name} {value:.3f}" for name, value in beside),
            f"{format_seconds(left)} left" if left > 0 else "",
            f"{tokens / trained:,.0f} tokens/s{compiles}" if trained > 0 else "",
            format_bytes(peak) if peak is not None else "",
        ]
        return "  ".join(part for part in parts if part)


def rollout_words(event: RolloutEvent) -> list[str]:
    """['reward 0.412', '14/16 groups differ', '8 % cut', '2.4 turns']: from the third on if there are any."""
    reward, outcomes, agreement = event.get("reward"), event.get("outcomes", {}), event.get("agreement")
    failed = sum(count for name, count in outcomes.items() if name not in ("ok", "cut"))
    cut, faults = event.get("cut", 0.0), sum(event.get("faults", {}).values())
    return [
        "no reward" if reward is None else f"reward {reward:.3f}",
        f"{event.get('signal', 0)}/{event.get('groups', 0)} groups differ",
        *([f"{100 * cut:.0f} % cut"] if cut >= 0.005 else []),
        *([f"{failed} without a reward"] if failed else []),
        *([f"{turns:.1f} turns"] if (turns := event.get("turns")) is not None else []),
        *([f"{100 * agreement:.0f} % of pairs agree"] if agreement is not None else []),
        *([f"{plural(faults, 'call')} failed"] if faults else []),
    ]


def score_words(event: ScoreEvent) -> str:
    """'rows:test.jsonl, exact 0.425 (0.3 to 0.55), 40 items, 3.1 s'."""
    about = plural(event["items"], "item") + (f", {event['seconds']:.1f} s" if event["seconds"] else "")
    return f"{measure_name(event)} {score_value(event)}, {about}"


def eval_words(event: EvalEvent) -> str:
    """'held-out loss 2.104, perplexity 8.199, 1.02 bits per byte (8,408 tokens, 1.7 s)'."""
    known = {"loss": "held-out loss {:.4g}", "bits_per_byte": "{:.4g} bits per byte"}
    known["logp_likelier"] = "likelier answer {:.1f} nats"
    about = {
        "rows": "{:,.0f} row" + "s" * (event.get("rows") != 1),
        "tokens": "{:,.0f} tokens",
        "seconds": "{:.1f} s",
    }
    left = unreached([event])
    values = {name: value for name, value in numbers(event).items() if name not in left}
    words: list[str] = []
    if "reward" in values:  # of a run with rewards, whose loss is minus this
        values.pop("loss", None)
        for name in [name for name in ("reward", "pass_1", "pass_2", "pass_4") if name in values]:
            mean, low, high = (values.pop(name + end, None) for end in ("", "_low", "_high"))
            ends = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"  # none of one prompt
            words.append(f"held-out {name.replace('pass_', 'pass@')} {mean:.3g}{ends}")
    words += [known.get(name, name + " {:.4g}").format(v) for name, v in values.items() if name not in about]
    details = [form.format(values[name]) for name, form in about.items() if name in values]
    return ", ".join(words) + (f" ({', '.join(details)})" if details else "")


class LoadProgress:
    """Progress of loading or downloading: share done, after RATED seconds also GB/s (decimal) and time left.

    A context manager to call with (bytes_done, bytes_total).
    """

    def __init__(
        self,
        label: str = "load",
        quiet: bool = False,
        stream: TextIO | None = None,
        seconds_between: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label = label
        self.seconds_between = seconds_between
        self._clock = clock
        self._display = _Display(quiet, stream)
        self._began = self._shown = clock()
        self._first: tuple[float, int] | None = None  # (time, bytes) of the first call
        self._inside = False

    def __enter__(self) -> LoadProgress:
        self._inside = True
        self._began = self._shown = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self._display.close()

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        now, finished = self._clock(), bytes_done >= bytes_total
        self._first = self._first or (now, bytes_done)
        drawing = self._inside and self._display.may_draw
        # 0.1 s between redraws: a checkpoint of 69,120 tensors calls this once per tensor. A task that
        # finishes before its first line prints nothing
        soon = now - self._shown < (0.1 if drawing else self.seconds_between)
        if self._display.quiet or (soon and not (finished and (drawing or self._shown > self._began))):
            return
        self._shown = now
        status = self._status(bytes_done, bytes_total, now, *self._first)
        if drawing:
            self._display.draw(self.label, bytes_done, bytes_total, status)
        else:
            self._display.line(f"{self.label}  {status}")

    def _status(self, done: int, total: int, now: float, first: float, before: int) -> str:
        """Words on progress. before: bytes read at time `first`; the rate is over bytes read since."""
        words, seconds, read = f"{decimal_bytes(done)} of {decimal_bytes(total)}", now - first, done - before
        if seconds >= RATED and read > 0 and done < total:
            left = format_seconds((total - done) * seconds / read)
            words += f"  {decimal_bytes(read / seconds)}/s  {left} left"
        return words


class EncodeProgress:
    """Progress of reading data files: rows, rows/s and time left, shown after `after` seconds.

    A context manager to call with (rows, bytes_done, bytes_total).
    """

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        after: float = 1.0,
        seconds_between: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        label: str = "encode",
    ):
        self._clock, self._display, self._label = clock, _Display(quiet, stream), label
        self._between = 0.1 if self._display.may_draw else seconds_between
        self._began, self._next = clock(), after

    def __enter__(self) -> EncodeProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()

    def __call__(self, rows: int, bytes_done: int, bytes_total: int) -> None:
        seconds = self._clock() - self._began
        if self._display.quiet or seconds < self._next:
            return
        self._next = seconds + self._between
        words = f"{plural(rows, 'row')}  {rows / seconds:,.0f} rows/s"
        if 0 < bytes_done < bytes_total:
            words += f"  {format_seconds((bytes_total - bytes_done) * seconds / bytes_done)} left"
        if self._display.may_draw:
            self._display.draw(self._label, min(bytes_done, bytes_total), bytes_total, words)
        else:
            self._display.line(f"{self._label}  {words}")


class TokenizerProgress:
    """Progress of training a tokenizer: bytes read, then seconds of merging, whose end the library hides.

    A context manager to call with (bytes_done, bytes_total, done=True once all is read).
    """

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        seconds_between: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._display = clock, _Display(quiet, stream)
        self._between = 0.1 if self._display.may_draw else seconds_between
        self._began, self._next = clock(), self._between

    def __enter__(self) -> TokenizerProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()

    def __call__(self, bytes_done: int, bytes_total: int, *, done: bool) -> None:
        seconds = self._clock() - self._began
        if self._display.quiet or seconds < self._next:
            return
        self._next = seconds + self._between
        label = "merge" if done else "read"
        words = f"{decimal_bytes(min(bytes_done, bytes_total))} of {decimal_bytes(bytes_total)}"
        words += f"  {format_seconds(seconds)}"
        if self._display.may_draw:
            self._display.draw(label, min(bytes_done, bytes_total), bytes_total, words)
        else:
            self._display.line(f"{label}  {words}")
