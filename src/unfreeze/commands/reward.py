"""unfreeze reward show my.py --model M --data F: answers with their rewards, before any training.

my.py has a function reward(prompt, completion, **row), which gets the row's columns by keyword and returns a
number, or a dict of parts. my.py:Class is an environment, whose turns are shown. It runs in processes of its
own, with limits, as in training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text
from tyro.conf import Positional, arg

from unfreeze.config.columns import Columns
from unfreeze.config.device import Device
from unfreeze.config.judge import is_judge, read_judge
from unfreeze.config.parse import Files, Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.draws import SEEDS
from unfreeze.core.errors import ConfigError, DataError, nearest, printable
from unfreeze.core.field import about
from unfreeze.job.opening.device import load_shown, say
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.data.rows.row import Conversation
    from unfreeze.job.judge import Judge
    from unfreeze.rollout.environment import Environments
    from unfreeze.rollout.graders import Graders
    from unfreeze.rollout.reward import Graded
    from unfreeze.rollout.sampled import Sampled

SHOWN_LINES = 12  # of a text in the terminal; --out and --json have all


class Config(Frozen):
    reward: Annotated[Folder, Positional, arg(metavar="my.py")] = Field(
        description="Python file with a function reward; my.py:name picks another, or an environment."
        " judge.toml asks a model"
    )
    env: Folder = Field(
        default="", description="environment, my.py:Class, beside a function that grades its last turn"
    )
    turns: int = Field(default=8, ge=1, description="most turns of an answer with an environment")
    model: ModelName = Field(description="checkpoint or run folder, adapter folder, or Hugging Face id")
    data: Files = Field(
        min_length=1,
        description="rows with prompts, as for sft; an answer that a row has is not shown to the model",
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    sample: int = Field(default=8, ge=1, description="rows to answer, from the start of the data")
    answers: int = Field(default=1, ge=1, description="answers to each row")
    out: Folder = Field(default="", description="file for the answers, a JSON object a line")
    max_new_tokens: int = Field(default=128, ge=1, description="most tokens of an answer")
    temperature: float = Field(default=1.0, ge=0, description="as in training; 0: greedy")
    seconds: float = Field(default=10.0, gt=0, description="most time that the reward of one answer may take")
    network: bool = Field(default=False, description="let the reward's processes reach the network")
    seed: int = Field(default=0, ge=SEEDS[0], le=SEEDS[1], description="seed of the sampling")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype. auto: bfloat16 where the hardware has bf16 matmul units"
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Answer some prompts and show each answer's reward.

    -> mean, outcomes (their counts), notes, answers (lines as a run's rollout files have them).
    """
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["show", *arguments]
    if not arguments or arguments[0] != "show":
        other = f"{arguments[0]!r}{nearest(arguments[0], ['show'])}" if arguments else "nothing"
        raise ConfigError(
            f"reward takes the subcommand show, not {other}",
            next="unfreeze reward show my.py --model MODEL --data FILE",
        )
    config = parse(Config, arguments[1:], command="reward show", description=__doc__ or "", positional=True)
    with ExitStack() as ends:
        graders, environments = started(config, common, ends)
        rows = prompts(config, common)
        for each in filter(None, (graders, environments)):
            each.check(rows)  # before the model is loaded
        lines, graded = answered(config, rows, graders, environments, common)
    notes = [*notes_on(graded, config.answers)]
    if config.out:
        out = Path(config.out)
        with writing(out.parent, "out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    console = PipeConsole(stderr=common.json, highlight=False)
    if not common.quiet:
        for line, each in zip(lines, graded, strict=True):
            show(console, line, each)
        for note in notes:
            write(console, note, "bold")
    from unfreeze.rollout.reward import outcomes

    rewards = [each.reward for each in graded if each.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"mean": mean, "outcomes": outcomes(graded), "notes": notes, "answers": lines}


def prompts(config: Config, common: Common) -> list[Conversation]:
    """Read the first rows of the data."""
    from unfreeze.data.rows.columns import renames_of
    from unfreeze.data.rows.files import read_rows
    from unfreeze.data.rows.sources import files_of

    renames_of(config.columns)
    files = [path for name in config.data for path in files_of(name, say=say(common))]
    each = (row for path in files for row in read_rows(path, columns=config.columns, answers="asked"))
    rows = list(islice(each, config.sample))
    if not rows:
        raise DataError(f"{config.data[0]} has no rows", next='each row needs a prompt: {"prompt": "…"}')
    return rows


def started(
    config: Config, common: Common, ends: ExitStack
) -> tuple[Graders | Judge | None, Environments | None]:
    """Start what grades. -> functions or a judge, environments; None without any."""
    from unfreeze.rollout.environment import Environments
    from unfreeze.rollout.graders import Graders, Limits
    from unfreeze.rollout.user_code import are_environments, user_code

    limits, env = Limits(seconds=config.seconds, network=config.network), config.env
    judge = is_judge(config.reward)
    alone = not env and not judge and all(map(are_environments, user_code(config.reward)))
    graders = environments = None
    if judge:
        graders = judging(config, ends)
    elif not alone:
        graders = ends.enter_context(Graders(config.reward, limits, say=say(common)))
    if alone or env:
        environments = ends.enter_context(
            Environments(env or config.reward, limits, most_turns=config.turns, say=say(common))
        )
        environments.check_reward("" if alone else config.reward)
    return graders, environments


def judging(config: Config, ends: ExitStack) -> Judge:
    """Return the judge. Its budget is that of this command."""
    from unfreeze.job.judge import Judge, refuse_alone

    judge = read_judge(config.reward)
    refuse_alone(judge, config.answers)
    folder = ends.enter_context(TemporaryDirectory(prefix="unfreeze-judge-"))
    return ends.enter_context(Judge(judge, Path(folder)))


def answered(
    config: Config,
    rows: Sequence[Conversation],
    graders: Graders | Judge | None,
    environments: Environments | None,
    common: Common,
) -> tuple[list[dict[str, Any]], list[Graded]]:
    """Generate the answers and grade them. -> their lines, and what the graders said."""
    model = load_shown(config.model, config.dtype, config.device, common)
    from unfreeze.data import encode_chat
    from unfreeze.data.store.examples import Example
    from unfreeze.parallel.processes.collectives import ALONE
    from unfreeze.rollout.answering import Asked, InOneTurn
    from unfreeze.rollout.rollouts import Settings
    from unfreeze.rollout.talks import Talks

    if model.tokenizer is None:
        raise ConfigError(
            f"{config.model} has no tokenizer, so it cannot write text", next="use another model"
        )
    room = model.decoder.shape.max_positions
    n, sampling = config.answers, {"temperature": config.temperature, "at_once": None}
    settings = Settings(len(rows), n, config.max_new_tokens, **sampling)
    grade = graders and graders.grade
    if environments is not None:
        how = Talks(
            model.engine, model.tokenizer, environments, settings, window=room, group=ALONE, grade=grade
        )
        tools = [environments.tools(row) for row in rows]
    else:
        assert grade is not None
        how, tools = InOneTurn(model.engine, grade, settings), [row.tools for row in rows]
    questions: list[Asked] = []
    for place, (row, has) in enumerate(zip(rows, tools, strict=True)):
        ids = encode_chat(model.tokenizer, row.messages, has)
        if len(ids) >= room:
            raise DataError(
                f"row {row.row}: the prompt fills the model's {room} positions",
                next="shorten or remove the row",
            )
        questions.append(Asked(Example(ids, [0.0] * len(ids), row.row), row, (config.seed, place)))
    done = how.sample(questions, n, greedy=config.temperature == 0)
    every = [(each.row, answer) for each, answers in zip(questions, done, strict=True) for answer in answers]
    graded = how.grade(every)
    lines = [
        line_of(place, n, row, answer, worth)
        for place, ((row, answer), worth) in enumerate(zip(every, graded, strict=True))
    ]
    return lines, graded


def line_of(place: int, answers: int, row: Conversation, done: Sampled, graded: Graded) -> dict[str, Any]:
    """One answer, under the names that a run's rollout files use."""
    prompt = row.messages[-1]["content"]
    return {
        "group": place // answers,
        "answer": place % answers,
        "row": row.row,
        "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt),
        "text": done.text,
        "stop": done.stop,
        **({"turns": done.turns} if done.turns else {}),
        **graded.as_json(),
    }


def notes_on(graded: Sequence[Graded], answers: int) -> list[str]:
    """Sentences about all rewards together."""
    from unfreeze.rollout.reward import outcomes

    rewards = [each.reward for each in graded if each.reward is not None]
    failed = {name: count for name, count in outcomes(graded).items() if name != "ok"}
    notes: list[str] = []
    if rewards:
        low, high, mean = min(rewards), max(rewards), sum(rewards) / len(rewards)
        notes.append(f"{len(rewards)} rewards: mean {mean:.4g}, from {low:.4g} to {high:.4g}")
        if low == high and len(rewards) > 1:
            notes.append(f"note: every reward is {low:.4g}, so nothing can be learnt from these answers")
        elif answers > 1:
            groups = [graded[at : at + answers] for at in range(0, len(graded), answers)]
            alike = sum(len({each.reward for each in group}) == 1 for group in groups)
            notes.append(f"{len(groups) - alike} of {len(groups)} prompts have answers of different reward")
    if failed:
        kinds = ", ".join(f"{count} {name}" for name, count in failed.items())
        notes.append(f"warning: {sum(failed.values())} of {len(graded)} answers have no reward ({kinds})")
    return notes


def show(console: Console, line: dict[str, Any], graded: Graded) -> None:
    """Print one answer: its prompt, its text, its reward."""
    write(console, f"\nrow {line['row']}, answer {line['answer'] + 1} ({line['stop']})", "bold")
    write(console, line["prompt"], "dim")
    for role, text in line.get("turns") or [("", line["text"])]:
        if role:
            write(console, role, "dim")
        write(console, text or "(empty)")
    if graded.reward is None:
        write(console, f"no reward, {graded.outcome}: {graded.message}", "bold red")
    else:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in graded.parts.items())
        write(console, f"reward {graded.reward:.4g}" + (f" ({parts})" if parts else ""), "bold green")
        if graded.message:
            write(console, f"the judge: {graded.message}", "dim")
    if graded.printed:
        write(console, f"it printed: {graded.printed}", "dim")


def write(console: Console, text: str, style: str = "") -> None:
    """Print a text of anyone's, within the width: control characters become visible, long texts are cut."""
    lines = text.split("\n")
    more = len(lines) - SHOWN_LINES
    for line in lines[:SHOWN_LINES] if more > 1 else lines:
        console.print(Text(printable(line)), style=style, overflow="fold")
    if more > 1:
        console.print(f"… {more} more lines", style="dim")
