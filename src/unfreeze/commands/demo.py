"""unfreeze demo: fine-tune the built-in tiny-k2, in two or three minutes on two CPU cores.

tiny-k2 has Kimi-K2-Thinking's format with INT4 experts. The demo asks it held-out questions, trains LoRA on
every linear layer and all routed experts so that it answers like Yoda, and asks again.
Every number it prints is computed from those answers. The questions are about things that occur nowhere in
the training rows.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from unfreeze.config import sft as fields
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Frozen, parse, writing
from unfreeze.config.tables import Memory, Training, Watch
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED, EventLog
from unfreeze.core.layout import Layout
from unfreeze.core.schema import PromptSource
from unfreeze.evaluate.style import changes, compare_style
from unfreeze.recipes import sft
from unfreeze.report.html import write_report
from unfreeze.tracking.console import PipeConsole
from unfreeze.train.run import latest, read_record
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.evaluate.gap import Gap

SHOWN = 8
HELD_OUT: PromptSource = "held-out data"


class Config(Frozen):
    """Options of the demo; `make demo` runs with the defaults."""

    out: str = Field(
        default="runs/demo",
        description="run folder; an unfinished demo in it is resumed, a finished one replaced",
    )
    epochs: float = Field(
        default=10.0, gt=0, description="passes over the training rows; tuned on entities set aside from them"
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="peak learning rate of the adapters, tuned on the same entities"
    )
    rank: int = Field(default=16, ge=1, description="LoRA rank of every linear layer and expert")
    seed: int = Field(default=0, ge=0, description="seed of adapters and data order")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Run the demo. -> scores before and after, losses, seconds and the run's folder:

    style_before, style_after, facts_before, facts_after (per cent), known, asked, loss_first, loss_last,
    seconds, run.
    """
    started = time.perf_counter()
    config = parse(Config, arguments, command="demo", description=__doc__ or "")
    out = Path(config.out).expanduser()
    move_finished(out)
    items = [
        json.loads(line) for line in (TINY_K2 / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    job = sft.Config(
        model=str(TINY_K2),
        data=fields.Data(files=(str(TINY_K2 / "yoda_train.jsonl"),)),
        out=str(out),
        seed=config.seed,
        training=Training(epochs=config.epochs, tokens_per_step=1024),
        optimizer=fields.Optimizer(learning_rate=config.learning_rate, weight_decay=0.3),
        memory=Memory(dtype="float32", threads=1),
        place=Layout(recompute="nothing"),
        watch=Watch(samples=0),
        lora=LoraConfig(rank=config.rank, alpha=2.0 * config.rank),
    )
    from unfreeze.kernels.choice.ahead import compiling

    # On a new machine a second process compiles the loops of training while the questions are asked: training
    # itself takes one thread, which starts none.
    with compiling("cpu", 0, "float32"):
        # the same questions before and after training
        before, gap_before = ask_heldout(TINY_K2, items)
        trained = sft.train(job, common)
    if not trained["finished"]:
        print(f"to continue the demo: unfreeze demo --out {out}", file=sys.stderr)
        return trained
    after, gap_after = ask_heldout(out, items)
    measured = compare_style(before, after, items)
    # write answers and scores to the run's events, then print a table and the last line
    write_samples(out, items, before, after, measured, (gap_before, gap_after), trained["steps"])
    if is_demo(kept_folder(out)):
        shutil.rmtree(kept_folder(out))
    if not common.quiet:
        show_answers(items, before, after, measured, PipeConsole(stderr=common.json))
    seconds = time.perf_counter() - started
    if not common.quiet:
        print(
            f"{seconds:.0f} s in all. Results: {out}/report.html. To talk with the model: unfreeze chat"
            f" {out}",
            file=sys.stderr,
        )
    return {
        **measured,
        **{key: trained[key] for key in ("loss_first", "loss_last", "receipt", "steps", "run")},
        "seconds": seconds,
    }


def move_finished(out: Path) -> None:
    """Move a finished demo in `out` aside. An unfinished one stays and is resumed.

    The finished one is kept (in `kept_folder`) until the new one is finished.
    Raises ConfigError for a folder that holds anything else.
    """
    if out.is_file():
        raise ConfigError(
            f"out = {str(out)!r} is a file, not a folder", next="unfreeze demo --out ANOTHER_FOLDER"
        )
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_demo(out):
        raise ConfigError(
            f"{out} exists and is not a demo run; the demo would overwrite it",
            next="unfreeze demo --out ANOTHER_FOLDER",
        )
    save = latest(out)
    record = read_record(save) if save else None
    if record is None or record["step"] < record["schedule"]["steps"]:
        return
    old = kept_folder(out)
    if is_demo(old):  # left by an earlier demo
        shutil.rmtree(old)
    if old.exists() or Path.cwd().is_relative_to(out.resolve()):
        why = f"{old} is in the way" if old.exists() else "it is the current directory"
        raise ConfigError(
            f"the finished demo in {out} cannot be moved: {why}", next="unfreeze demo --out ANOTHER_FOLDER"
        )
    with writing(out, "out"):
        out.rename(old)
    print(
        f"moved the finished demo in {out} to {old}; it is removed when the new one is finished",
        file=sys.stderr,
    )


def kept_folder(out: Path) -> Path:
    """Folder that keeps a finished demo until the next one is finished."""
    return Path(os.path.abspath(out) + ".before")


def is_demo(folder: Path) -> bool:
    resolved = folder / RESOLVED
    return resolved.is_file() and read_object(resolved, ConfigError).get("model") == str(TINY_K2)


def ask_heldout(source: Path, items: Sequence[dict[str, str]]) -> tuple[list[str], Gap]:
    """Return the model's greedy answers to all held-out questions, generated in one batch.

    Also return the gap between the sampler's and the trainer's log-probabilities of these answers.
    """
    import unfreeze
    from unfreeze.evaluate.gap import gap_of_answers

    model = unfreeze.load(source, dtype="float32")  # as in training
    answers = model.chat_batch([item["question"] for item in items], max_new_tokens=48)
    gap = gap_of_answers(model.engine, [model.encode_chat(item["question"]) for item in items], answers)
    return [answer.text for answer in answers], gap


def write_samples(
    run: Path,
    items: Sequence[dict[str, str]],
    before: Sequence[str],
    after: Sequence[str],
    measured: dict[str, float],
    gaps: tuple[Gap, Gap],
    step: int,
) -> None:
    """Write answers, scores and gaps to the run's events, so that the report shows them."""
    log = EventLog(run / "events.jsonl")
    for item, was, now in zip(items[:SHOWN], before, after, strict=False):
        log.emit("sample", 0, when="before", prompt=item["question"], text=was, source=HELD_OUT)
        log.emit("sample", step, when="after", prompt=item["question"], text=now, source=HELD_OUT)
    for when, at, gap in zip(("before", "after"), (0, step), gaps, strict=True):
        log.emit("gap", at, when=when, **gap.as_dict())
        scores: dict[str, Any] = {name: measured[f"{name}_{when}"] for name in ("style", "facts")}
        if at:
            scores |= {"rows": int(measured["known"]), "changes": changes(before, after, items)}
        log.emit("eval", at, **scores)
    log.close()
    write_report(run)


def show_answers(
    items: Sequence[dict[str, str]],
    before: Sequence[str],
    after: Sequence[str],
    measured: dict[str, float],
    console: Console,
) -> None:
    """Print the questions with their answers before and after training, and the two scores."""
    table = Table(title="held-out questions", title_justify="left", box=None, pad_edge=False)
    for column in ("question", "before", "after"):
        table.add_column(column, overflow="fold")
    for item, was, now in zip(items[:SHOWN], before, after, strict=False):
        table.add_row(item["question"], was, f"[green]{now}[/green]")
    console.print(table)
    console.print(
        f"on the {measured['known']:.0f} of {measured['asked']:.0f} held-out questions whose answer it knew: "
        f"speaks like Yoda {measured['style_before']:.1f} % -> [bold]{measured['style_after']:.1f} %[/bold], "
        f"facts right {measured['facts_before']:.1f} % -> [bold]{measured['facts_after']:.1f} %[/bold]",
        highlight=False,
    )
