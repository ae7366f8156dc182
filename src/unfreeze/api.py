"""Python as a way in: the same runs as the command line's, with results to look at.

run = unfreeze.sft(model="…", data="chat.jsonl", rank=16, epochs=2)
run.loss, run.receipt, run.events
run.chat("What is the capital of France?"); run.report()

job = unfreeze.prepare("run.toml")                                  # one's own loop
for batch in job.batches:
    job.forward_backward(batch)
    job.optim_step()
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from unfreeze.commands import export as exporting
from unfreeze.config.parse import from_keywords, writing
from unfreeze.config.python import in_python
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError, UserError
from unfreeze.core.schema import Event, GroupReceipt, TrainEvent
from unfreeze.job import job
from unfreeze.job.end.folder import SAME_CALL
from unfreeze.job.parts import Parts
from unfreeze.recipes import distill as distilling
from unfreeze.recipes import prefer as preferring
from unfreeze.recipes import pretrain as pretraining
from unfreeze.recipes import sft as fine_tuning
from unfreeze.report.events import of_kind, read_events
from unfreeze.report.html import page, summary_lines, write_report
from unfreeze.report.run import read_run
from unfreeze.report.tables import receipt_text

if TYPE_CHECKING:
    from unfreeze.generate.model import Message, Model
    from unfreeze.job.loop import Loop
    from unfreeze.train.fit import OnStep
    from unfreeze.train.step import Objective

C = TypeVar("C", bound=TrainingConfig)


class FinishedRun:
    """What a run left behind, read from its folder: numbers, tables, answers, the report."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @cached_property
    def events(self) -> list[Event]:
        """Everything that was written while it ran, in order: dicts with "kind", "step", "time", and more.

        docs/reference/events.md lists them.
        """
        return read_events(self.path / "events.jsonl")

    @property
    def losses(self) -> list[float]:
        """The loss of each step, in nats per supervised token."""
        return [loss for event in of_kind(self.events, TrainEvent) if (loss := event.get("loss")) is not None]

    @property
    def loss(self) -> float | None:
        """The loss of the last step, in nats per supervised token; None before there is one."""
        return self.losses[-1] if self.losses else None

    @property
    def receipt(self) -> Receipt:
        """group -> what learned in it (adapters/receipt.py: make_receipt); empty where none was taken."""
        return Receipt(read_run(self.path).groups)

    @property
    def finished(self) -> bool:
        """Whether it reached its last step."""
        return read_run(self.path).state == "done"

    @cached_property
    def model(self) -> Model:
        """The trained model, loaded once, in the dtype it was trained in, on CUDA if there is one."""
        from unfreeze.generate.model import load

        return load(self.path, dtype=read_run(self.path).config.get("memory.dtype", "auto"), device="auto")

    def chat(self, messages: str | Sequence[Message], **options: Any) -> str:
        """The trained model's answer; as Model.chat."""
        return self.model.chat(messages, **options)

    def generate(self, prompt: str, **options: Any) -> str:
        """The trained model's continuation of a text; as Model.generate."""
        return self.model.generate(prompt, **options)

    def report(self) -> Report:
        """Write report.html; shown inline where a notebook asks for it."""
        write_report(self.path)
        return Report(self.path / "report.html", page(read_run(self.path)))

    def export(self, reader: exporting.Reader = "peft", out: str | Path = "") -> Path:
        """The adapter as another program reads it, read again and compared. -> the folder.

        As `unfreeze export --for READER`.
        """
        config = exporting.Config(run=str(self.path), reader=reader, out=str(out))
        return Path(exporting.export(config, Common(quiet=True))["path"])

    def __repr__(self) -> str:
        return "\n".join(summary_lines(self.path))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Receipt(dict[str, GroupReceipt]):
    """group -> what learned in it; shown as the table that ends a run."""

    def __repr__(self) -> str:
        return receipt_text(self) if self else "no receipt was taken"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Report:
    """A run's page: `path` on disk; in a notebook it shows itself, in a frame of its own."""

    def __init__(self, path: Path, source: str):
        self.path, self._source = path, source

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        framed = html.escape(self._source, quote=True)
        return f'<iframe srcdoc="{framed}" sandbox="" style="width:100%;height:720px;border:0"></iframe>'


def sft(
    config: str | Path | None = None,
    *,
    objective: Objective | None = None,
    on_step: Sequence[OnStep] = (),
    quiet: bool = False,
    **fields: Any,
) -> FinishedRun:
    """Fine-tune, as `unfreeze sft`.

    config     a TOML file.
    fields     any field of it, on top; rank=16 stands for lora.rank. data may be rows: a list of dicts, a
               pandas DataFrame, a datasets.Dataset.
    objective  (hidden_TD, lm_head, batch) -> Loss, in place of cross entropy.
    on_step    called with (state, result) after each step.

    A run that was interrupted goes on with the same call. Raises UserError: one line, and what to do next.
    """
    return _run(fine_tuning.Config, fine_tuning.parts, "sft", config, fields, objective, on_step, quiet)


def pretrain(
    config: str | Path | None = None,
    *,
    objective: Objective | None = None,
    on_step: Sequence[OnStep] = (),
    quiet: bool = False,
    **fields: Any,
) -> FinishedRun:
    """Train every weight on text, as `unfreeze pretrain`; arguments as of sft."""
    return _run(pretraining.Config, pretraining.parts, "pretrain", config, fields, objective, on_step, quiet)


def distill(
    config: str | Path | None = None, *, on_step: Sequence[OnStep] = (), quiet: bool = False, **fields: Any
) -> FinishedRun:
    """Learn a teacher's next-token probabilities, as `unfreeze distill`; arguments as of sft.

    unfreeze.distill(model="DIR", teacher="DIR_OR_RUN", data="chat.jsonl", temperature=2.0)
    """
    if fields.get("prepare"):
        raise ConfigError(
            "prepare asks a teacher and trains nothing: it is the command's",
            next="unfreeze distill --model M --teacher T --data F --prepare FOLDER",
        )
    return _run(distilling.Config, distilling.parts, "distill", config, fields, None, on_step, quiet)


def prefer(
    config: str | Path | None = None, *, on_step: Sequence[OnStep] = (), quiet: bool = False, **fields: Any
) -> FinishedRun:
    """Learn to prefer one answer to another, as `unfreeze prefer`; arguments as of sft.

    unfreeze.prefer(model="DIR", data=[{"prompt": "…", "chosen": "…", "rejected": "…"}], loss="dpo", beta=0.1)
    """
    return _run(preferring.Config, preferring.parts, "prefer", config, fields, None, on_step, quiet)


def prepare(
    config: str | Path | None = None,
    *,
    objective: Objective | None = None,
    quiet: bool = False,
    **fields: Any,
) -> Loop:
    """A fine-tuning run whose loop is the caller's (job/loop.py).

    It has job.batches, job.forward_backward and job.optim_step. Arguments as of sft.
    """
    from unfreeze.job.loop import Loop

    with _said_in_python(fine_tuning.Config):
        made = _config(fine_tuning.Config, fields, "prepare", config)
        return Loop(made, _with(fine_tuning.parts(made), objective, ()), Common(quiet=quiet))


def _run(
    kind: type[C],
    parts: Callable[[C], Parts],
    name: str,
    file: str | Path | None,
    fields: dict[str, Any],
    objective: Objective | None,
    on_step: Sequence[OnStep],
    quiet: bool,
) -> FinishedRun:
    with _said_in_python(kind):
        config = _config(kind, fields, name, file)
        result = job.run(config, _with(parts(config), objective, on_step), Common(quiet=quiet), SAME_CALL)
    return FinishedRun(result.get("run", config.run_dir))


@contextmanager
def _said_in_python(kind: type[TrainingConfig]) -> Generator[None]:
    """Remedies name keywords, not flags."""
    try:
        yield
    except UserError as error:
        error.message, error.next = in_python(kind, error.message), in_python(kind, error.next)
        raise


def _rows(data: Any) -> Any:
    """`data` as a list of rows where it is a pandas DataFrame (absent cells left out) or a datasets.Dataset.

    Anything else as it is. Raises DataError for one row, several splits, no rows, and what is read once.
    """
    if isinstance(data, dict):
        parts = cast(dict[str, Any], data)
        split = next((name for name, part in parts.items() if hasattr(part, "to_list")), "")
        raise DataError(
            f"data has several splits: {', '.join(map(str, parts))}"
            if split
            else "data is one dict; rows are a list of dicts",
            next=f'data=data["{split}"]' if split else "data=[row]",
        )
    if hasattr(data, "to_list") and hasattr(data, "column_names"):
        data = data.to_list()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):
        records: list[dict[Any, Any]] = data.to_dict("records")
        data = [{name: cell for name, cell in row.items() if not _absent(cell)} for row in records]
    if isinstance(data, Iterator) or type(data).__name__ == "IterableDataset":
        kind = type(cast(object, data)).__name__
        raise DataError(f"data is a {kind}; rows are a list of dicts", next="data=list(data)")
    if isinstance(data, list) and not data:
        raise DataError(
            "data is empty: there is no row in it",
            next='data=[{"prompt": "…", "completion": "…"}], or a file: data="chat.jsonl"',
        )
    return cast(Any, data)


def _absent(cell: Any) -> bool:
    """Whether a table's cell is empty: None, or NaN, which is not equal to itself."""
    return cell is None or (isinstance(cell, float) and cell != cell)


def _config(kind: type[C], fields: dict[str, Any], function: str, file: str | Path | None) -> C:
    """from_keywords, where a FinishedRun is its folder, and `data` may be rows: a file of the run folder.

    A file, because a run that goes on, its report and its card look rows up again. It is named after what it
    holds, so other rows are another file and, where `out` is not given, another run.
    """
    fields = {name: str(v.path) if isinstance(v, FinishedRun) else v for name, v in fields.items()}
    rows = _rows(fields.get("data"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return from_keywords(kind, fields, function=function, file=file)
    try:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data: a row is not JSON: {error}", next="texts, numbers, lists and dicts; or give a file"
        ) from None
    name = f"rows-{hashlib.sha256(lines).hexdigest()[:8]}.jsonl"
    config = from_keywords(kind, {**fields, "data": name}, function=function, file=file)
    path = config.run_dir / name
    with writing(config.run_dir, "out"):
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines)
    data = config.data.model_copy(update={"files": (str(path),)})
    return config.model_copy(update={"data": data, "out": str(config.run_dir)})


def _with(parts: Parts, objective: Objective | None, on_step: Sequence[OnStep]) -> Parts:
    from dataclasses import replace

    return replace(parts, objective=objective or parts.objective, on_step=(*parts.on_step, *on_step))
