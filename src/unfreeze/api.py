"""The Python API: the same runs as on the command line, with results as objects.

run = unfreeze.sft(model="…", data="chat.jsonl", rank=16, epochs=2)
run.loss, run.receipt, run.events
run.chat("What is the capital of France?"); run.report()

job = unfreeze.prepare("run.toml")                                  # your own training loop
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
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from unfreeze.commands import export as exporting
from unfreeze.config.parse import from_keywords, writing
from unfreeze.config.python import in_python
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError, UserError
from unfreeze.core.run_folder import refuse_other_files
from unfreeze.core.schema import Event, GroupReceipt, TrainEvent
from unfreeze.job import job
from unfreeze.job.end.folder import SAME_CALL
from unfreeze.job.parts import Parts
from unfreeze.recipes import distill as distilling
from unfreeze.recipes import grpo as rewarding
from unfreeze.recipes import prefer as preferring
from unfreeze.recipes import pretrain as pretraining
from unfreeze.recipes import sft as fine_tuning
from unfreeze.report.events import of_kind, read_events
from unfreeze.report.html import page, summary_lines, write_report
from unfreeze.report.run import read_run
from unfreeze.report.scores import in_lines
from unfreeze.report.tables import receipt_text

if TYPE_CHECKING:
    from unfreeze.generate.model import Message, Model
    from unfreeze.job.loop import Loop
    from unfreeze.train.fit import OnStep
    from unfreeze.train.step import Objective

C = TypeVar("C", bound=TrainingConfig)


class FinishedRun:
    """Results of a run, read from its folder: numbers, tables, answers, the report."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @cached_property
    def events(self) -> list[Event]:
        """All events of the run, in order: dicts with "kind", "step", "time" and more.

        docs/reference/events.md describes them.
        """
        return read_events(self.path / "events.jsonl")

    @property
    def losses(self) -> list[float]:
        """Loss of each step, in nats per supervised token."""
        return [loss for event in of_kind(self.events, TrainEvent) if (loss := event.get("loss")) is not None]

    @property
    def loss(self) -> float | None:
        """Loss of the last step, in nats per supervised token; None before the first."""
        return self.losses[-1] if self.losses else None

    @property
    def receipt(self) -> Receipt:
        """Receipt: group -> its learning (adapters/receipt.py: make_receipt); empty if there is none."""
        return Receipt(read_run(self.path).groups)

    @property
    def finished(self) -> bool:
        """True if the run reached its last step."""
        return read_run(self.path).state == "done"

    @cached_property
    def model(self) -> Model:
        """The trained model, loaded once, in its training dtype, on CUDA if there is one."""
        from unfreeze.job.opening.load import load

        return load(self.path, dtype=read_run(self.path).config.get("memory.dtype", "auto"), device="auto")

    def chat(self, messages: str | Sequence[Message], **options: Any) -> str:
        """Answer of the trained model; see Model.chat."""
        return self.model.chat(messages, **options)

    def generate(self, prompt: str, **options: Any) -> str:
        """Continuation of a text by the trained model; see Model.generate."""
        return self.model.generate(prompt, **options)

    def report(self) -> Report:
        """Write report.html; a notebook shows it inline."""
        write_report(self.path)
        return Report(self.path / "report.html", page(read_run(self.path)))

    def export(self, reader: exporting.Reader = "peft", out: str | Path = "") -> Path:
        """Export the adapter for another program, read it back and compare. -> the folder.

        Same as `unfreeze export --for READER`.
        """
        config = exporting.Config(run=str(self.path), reader=reader, out=str(out))
        return Path(exporting.export(config, Common(quiet=True))["path"])

    def __repr__(self) -> str:
        return "\n".join(summary_lines(self.path))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Receipt(dict[str, GroupReceipt]):
    """Receipt (group -> its learning), displayed as a table."""

    def __repr__(self) -> str:
        return receipt_text(self) if self else "no receipt"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Report:
    """HTML report of a run: `path` on disk; a notebook shows it in a frame."""

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
    """Fine-tune, like `unfreeze sft`.

    config     a TOML file.
    fields     config fields, overriding the file; rank=16 means lora.rank. data can be rows: a list of dicts,
               a pandas DataFrame, or a datasets.Dataset.
    objective  (hidden_TD, lm_head, batch) -> Loss, instead of cross entropy.
    on_step    called with (state, result) after each step.

    The same call resumes an interrupted run. Raises UserError with a one-line message and the next step.
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
    """Train every weight on text, like `unfreeze pretrain`. Arguments as for sft."""
    return _run(pretraining.Config, pretraining.parts, "pretrain", config, fields, objective, on_step, quiet)


def distill(
    config: str | Path | None = None, *, on_step: Sequence[OnStep] = (), quiet: bool = False, **fields: Any
) -> FinishedRun:
    """Learn a teacher's next-token probabilities, like `unfreeze distill`. Arguments as for sft.

    unfreeze.distill(model="DIR", teacher="DIR_OR_RUN", data="chat.jsonl", temperature=2.0)
    """
    if fields.get("prepare"):
        raise ConfigError(
            "prepare only runs the teacher and trains nothing; use the command line for it",
            next="unfreeze distill --model M --teacher T --data F --prepare FOLDER",
        )
    return _run(distilling.Config, distilling.parts, "distill", config, fields, None, on_step, quiet)


def prefer(
    config: str | Path | None = None, *, on_step: Sequence[OnStep] = (), quiet: bool = False, **fields: Any
) -> FinishedRun:
    """Learn to prefer one answer to another, like `unfreeze prefer`. Arguments as for sft.

    unfreeze.prefer(model="DIR", data=[{"prompt": "…", "chosen": "…", "rejected": "…"}], loss="dpo", beta=0.1)
    """
    return _run(preferring.Config, preferring.parts, "prefer", config, fields, None, on_step, quiet)


def grpo(
    config: str | Path | None = None,
    *,
    reward: str | Callable[..., Any] | None = None,
    env: str | Callable[..., Any] | None = None,
    on_step: Sequence[OnStep] = (),
    quiet: bool = False,
    **fields: Any,
) -> FinishedRun:
    """Learn from rewards of the model's own answers, like `unfreeze grpo`. Other arguments as for sft.

    unfreeze.grpo(model="DIR", data=[{"prompt": "2 + 3 =", "answer": "5"}], reward=my_function)

    reward  my_function(prompt, completion, **row) -> number or dict of parts, or "my.py:name". It runs in
            processes of its own, which read it from its file; one of a notebook is written into the run.
    env     a class with tools and get_reward (docs/howto/reward.md), or "my.py:Class", likewise
    """
    for name, code in (("env", env), ("reward", reward)):
        written = _code_file(name, code, fields, config) if callable(code) else code
        fields = {**fields, **({} if written is None else {name: written})}
    return _run(rewarding.Config, rewarding.parts, "grpo", config, fields, None, on_step, quiet)


def _code_file(
    field: str, code_of: Callable[..., Any], fields: dict[str, Any], file: str | Path | None
) -> str:
    """Return my.py:name for a function or class; the text of a notebook's becomes a file of the run."""
    from unfreeze.rollout.user_code import user_code

    (code,) = user_code(code_of, field=field)
    path = Path(code.path)
    if not path.is_file():
        text = code.text.encode()
        name = f"{field}-{hashlib.sha256(text).hexdigest()[:8]}.py"
        built = _config(rewarding.Config, {**fields, field: name}, "grpo", file)
        path = built.run_dir / name
        refuse_other_files(built.run_dir)
        with writing(built.run_dir, "out"):
            built.run_dir.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    return f"{path}:{code.names[0]}"


class Evaluation(dict[str, Any]):
    """Result of `evaluate`: models, tasks (scores, changes, grid, notes), page; displayed as its tables."""

    def __repr__(self) -> str:
        rows = in_lines(self)
        return "\n".join(line for name, lines in rows for line in (name, *(f"  {each}" for each in lines)))

    def _repr_html_(self) -> str:
        return Report(Path(self["page"]), Path(self["page"]).read_text(encoding="utf-8"))._repr_html_()


def evaluate(
    *models: FinishedRun | str | Path,
    tasks: str | Sequence[str | tuple[str, Callable[..., Any]]],
    quiet: bool = False,
    **fields: Any,
) -> Evaluation:
    """Score runs and models, like `unfreeze eval`: before and after, with intervals.

    result = unfreeze.evaluate(run, tasks=["rows:test.jsonl:exact", ("rows:test.jsonl", mine), "needle"])
    result["tasks"][0]["changes"][0]["verdict"]

    models  runs, whose model before is scored, too, or checkpoints
    tasks   names as on the command line; (rows:FILE, mine): the metric is mine(prompt, completion, **row)
    fields  limit, max_new_tokens, batch, lengths, seed, dtype, out, …

    A task that fails has "error" in place of scores; the others go on. Raises UserError for what is wrong
    before a model is loaded.
    """
    from unfreeze.commands import eval as scoring

    several = [tasks] if isinstance(tasks, str) else list(tasks)
    names = [each if isinstance(each, str) else f"{each[0]}:{_metric_file(each[1])}" for each in several]
    paths = tuple(str(each.path if isinstance(each, FinishedRun) else each) for each in models)
    keywords = {"models": paths, "tasks": names, **fields}
    config = from_keywords(scoring.Config, keywords, function="evaluate", command="eval")
    return Evaluation(scoring.evaluate(config, Common(quiet=True) if quiet else Common(), shown=False))


def _metric_file(metric: Callable[..., Any]) -> str:
    """Return my.py:name of a function. Raises ConfigError for one that stands in no file."""
    from unfreeze.rollout.user_code import user_code

    (code,) = user_code(metric, field="tasks")
    if not Path(code.path).is_file():
        raise ConfigError(
            f"tasks: {code.names[0]} is a function of a notebook",
            next="write it to my.py, give rows:FILE:my.py",
        )
    return f"{code.path}:{code.names[0]}"


def train_tokenizer(
    files: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    vocab: int = 8192,
    quiet: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer, like `unfreeze tokenizer train`. -> the facts that it prints.

    unfreeze.train_tokenizer(files="corpus.jsonl", vocab=8192, out="tok")["held_out"]

    files   data files, folders, patterns or hf:org/name, with text or messages
    fields  reserved, held_out, seed, columns, on_bad_row

    Facts: path, vocabulary (base, total, padded), merges, documents, bytes, bad_rows, seconds, sha256, and
    held_out: kind of document -> documents, bytes, tokens, bytes_per_token.
    """
    from unfreeze.commands import tokenizer as making

    keywords = {"files": files, "out": out, "vocab": vocab, **fields}
    config = from_keywords(making.Config, keywords, function="train_tokenizer", command="tokenizer train")
    return making.train(config, Common(quiet=quiet))


def swap(
    model: Model | FinishedRun | str | Path,
    at: str,
    part: str,
    *,
    init: Literal["copy", "new"] = "copy",
    seed: int = 0,
    **options: Any,
) -> Model:
    """A trainable model with `part` in place of the modules `at`; the others keep their weights, to the bit.

    swapped = unfreeze.swap(unfreeze.load("DIR"), "layers.*.self_attn", "sliding_window", window=128)
    swapped.generate("Once upon"), swapped.save("DIR2")

        model    a loaded model, which stays as it is, or a checkpoint's folder or id
        at       names of modules, as in the checkpoint; * stands for every layer, 2-5 for four of them
        part     its name; `unfreeze pretrain --help parts` lists them with their options
        init     "copy": parameters that the part has, too, are kept; "new": all of the part's are drawn
        seed     of the drawn values
        options  of the part

    Weights that train are copies of a loaded model's, packed ones are shared with it. All that are not packed
    require a gradient, in the dtype that the model computes in. `full` where attention is full already
    changes nothing. Raises UserError for a place, part or option that is unknown, and for shapes that do not
    fit.
    """
    from unfreeze.compress.swap_model import swapped
    from unfreeze.compress.swapped import Wish, refuse_adapters
    from unfreeze.generate.model import Model
    from unfreeze.job.opening.load import load

    wish = Wish(at, part, options, init, seed)
    if isinstance(model, Model):
        return swapped(model, wish)
    folder = Path(model.path if isinstance(model, FinishedRun) else model).expanduser()
    refuse_adapters(folder)
    return swapped(load(folder if folder.exists() else str(model)), wish, keep=False)


def prepare(
    config: str | Path | None = None,
    *,
    objective: Objective | None = None,
    quiet: bool = False,
    **fields: Any,
) -> Loop:
    """Open a fine-tuning run whose loop the caller writes (job/loop.py).

    It has job.batches, job.forward_backward and job.optim_step. Arguments as for sft.
    """
    from unfreeze.job.loop import Loop

    with _with_python_remedies(fine_tuning.Config):
        built = _config(fine_tuning.Config, fields, "prepare", config)
        return Loop(built, _with(fine_tuning.parts(built), objective, ()), Common(quiet=quiet))


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
    with _with_python_remedies(kind):
        config = _config(kind, fields, name, file)
        result = job.run(config, _with(parts(config), objective, on_step), Common(quiet=quiet), SAME_CALL)
    return FinishedRun(result.get("run", config.run_dir))


@contextmanager
def _with_python_remedies(kind: type[TrainingConfig]) -> Generator[None]:
    """Rewrite flags in an error's remedy as keywords."""
    try:
        yield
    except UserError as error:
        error.message, error.next = in_python(kind, error.message), in_python(kind, error.next)
        raise


def _rows(data: Any) -> Any:
    """Convert a pandas DataFrame (without its empty cells) or a datasets.Dataset to a list of rows.

    Anything else is returned unchanged. Raises DataError for a single row, several splits, no rows, or an
    iterator.
    """
    if isinstance(data, dict):
        parts = cast(dict[str, Any], data)
        split = next((name for name, part in parts.items() if hasattr(part, "to_list")), "")
        raise DataError(
            f"data has several splits: {', '.join(map(str, parts))}"
            if split
            else "data is a single dict; give a list of dicts",
            next=f'data=data["{split}"]' if split else "data=[row]",
        )
    if hasattr(data, "to_list") and hasattr(data, "column_names"):
        data = data.to_list()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):
        records: list[dict[Any, Any]] = data.to_dict("records")
        data = [{name: cell for name, cell in row.items() if not _absent(cell)} for row in records]
    if isinstance(data, Iterator) or type(data).__name__ == "IterableDataset":
        kind = type(cast(object, data)).__name__
        raise DataError(f"data is a {kind}; give a list of dicts", next="data=list(data)")
    if isinstance(data, list) and not data:
        raise DataError(
            "data is empty: there is no row in it",
            next='data=[{"prompt": "…", "completion": "…"}], or a file: data="chat.jsonl"',
        )
    return cast(Any, data)


def _absent(cell: Any) -> bool:
    """True if a table's cell is empty: None, or NaN, which is not equal to itself."""
    return cell is None or (isinstance(cell, float) and cell != cell)


def _config(kind: type[C], fields: dict[str, Any], function: str, file: str | Path | None) -> C:
    """Build a Config from keywords. A FinishedRun stands for its folder; rows in `data` become a file.

    The file is in the run folder, because a resumed run, its report and its card read rows again. Its name is
    a hash of its contents, so other rows make another file and, without `out`, another run.
    """
    fields = {name: str(v.path) if isinstance(v, FinishedRun) else v for name, v in fields.items()}
    rows = _rows(fields.get("data"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return from_keywords(kind, fields, function=function, file=file)
    try:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data: a row is not JSON: {error}",
            next="use only texts, numbers, lists and dicts, or give a file",
        ) from None
    name = f"rows-{hashlib.sha256(lines).hexdigest()[:8]}.jsonl"
    config = from_keywords(kind, {**fields, "data": name}, function=function, file=file)
    path = config.run_dir / name
    refuse_other_files(config.run_dir)
    with writing(config.run_dir, "out"):
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines)
    data = config.data.model_copy(update={"files": (str(path),)})
    return config.model_copy(update={"data": data, "out": str(config.run_dir)})


def _with(parts: Parts, objective: Objective | None, on_step: Sequence[OnStep]) -> Parts:
    from dataclasses import replace

    return replace(parts, objective=objective or parts.objective, on_step=(*parts.on_step, *on_step))
