"""unfreeze life small.toml: a model's whole life, one command: tokenizer, pretrain, sft, distill, …

The file lists stages, each a command of unfreeze, and scores that every model gets. Each stage has a folder
in `out`. The same command again continues: finished stages stay, and the one that was interrupted resumes.
life.html has every stage's score, and stages that begin at the same model side by side.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.life_scores import difference, measured
from unfreeze.commands.staged import STOP, Launch, Stopped, by_script, digest, has_files, keep, launch, told
from unfreeze.config.life import Life, Score, Stage, filled, read_life
from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.core.units import format_seconds
from unfreeze.report.life import write_life
from unfreeze.report.tables import ABSENT
from unfreeze.untrusted.json_object import read_object

RECORD, PAGE = "life.json", "life.html"
SCORED = ("pretrain", "sft", "distill", "prefer", "grpo", "upcycle", "merge")
"""Commands that leave a model."""
COMMANDS = ("tokenizer", "data", *SCORED)
WHOLE = ("tokenizer", "data", "upcycle", "merge")
"""Commands whose folder appears when it is complete, as a script's does. They refuse one that is there."""


class Config(Frozen):
    file: Annotated[Folder, Positional, arg(metavar="LIFE.toml")] = Field(
        description="file with stages and scores"
    )
    out: Folder = Field(default="", description="folder for everything; default: the file's")
    dry_run: bool = Field(default=False, description="print the commands, run nothing")


def main(arguments: list[str], common: Common, launch: Launch = launch) -> dict[str, Any]:
    """Run the stages that are left, score their models, write the page.

    -> stages (name, seconds, scores), out, page, finished.
    """
    config = parse(Config, arguments, command="life", description=__doc__ or "", positional=True)
    life = read_life(Path(config.file), config.out)
    refuse_unknown_commands(life)
    keys, out = keys_of(life), Path(life.out)
    record = opened(out, life, keys)
    forget_other_scores(life, record)
    if config.dry_run:
        return planned(life, record, common)
    with writing(out, "out"):
        out.mkdir(parents=True, exist_ok=True)
    again = shlex.join(["unfreeze", "life", *arguments])
    for number, stage in enumerate(life.stages, 1):
        done = record["stages"].get(stage.name, {})
        if not done.get("finished"):
            told(common, f"\nstage {number} of {len(life.stages)}: {stage.name}")
            try:
                run_stage(life, stage, record, keys[stage.name], launch, common)
            except KeyboardInterrupt:
                message = f"in stage {stage.name}; to continue, the same command: {again}"
                raise KeyboardInterrupt(message) from None
        score_stage(life, stage, record, common)
        write_life(out / PAGE, page_of(life, record))
    told(common, f"\nall {len(life.stages)} stages are done. Page: {out / PAGE}")
    stages = [{"name": stage.name, **shown(record["stages"][stage.name])} for stage in life.stages]
    return {"stages": stages, "out": str(out), "page": str(out / PAGE), "finished": True}


def refuse_unknown_commands(life: Life) -> None:
    """Refuse a stage whose command does not exist, or whose files are not there, before the first runs."""
    for stage in life.stages:
        words = stage.words
        if stage.run and words[0] not in COMMANDS:
            raise ConfigError(
                f"stage {stage.name!r}: {words[0]!r} is no command of a life{nearest(words[0], COMMANDS)}",
                next=f"one of {', '.join(COMMANDS)}",
            )
        if stage.python and not Path(words[0]).is_file():
            raise ConfigError(f"stage {stage.name!r}: there is no file {words[0]}", next="correct python")
    for score in life.scores:
        for file in (score.text, score.data, score.reward.partition(":")[0]):
            if file and "{" not in file and not Path(file).is_file():
                raise ConfigError(f"score {score.name!r}: there is no file {file}", next="correct the path")


def keys_of(life: Life) -> dict[str, str]:
    """Hash of each stage's command, of the files that it names, and of the stages that it reads."""
    keys: dict[str, str] = {}
    for stage in life.stages:
        texts = (stage.run, stage.python, *(keys[name] for name in stage.uses))
        keys[stage.name] = digest(texts, stage.words)
    return keys


def opened(out: Path, life: Life, keys: Mapping[str, str]) -> dict[str, Any]:
    """Read life.json. Raises ConfigError if a stage that has begun was made by other words or files."""
    if not (out / RECORD).is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty and has no {RECORD}", next="give another folder as --out")
        return {"stages": {}}
    record = read_object(out / RECORD, ConfigError)
    for stage in life.stages:
        before = record["stages"].get(stage.name)
        if before and not has_files(out / stage.name):
            del record["stages"][stage.name]  # nothing is there: it failed early, or was removed
        elif before and before["key"] != keys[stage.name]:
            reading = [other.name for other in life.stages if stage.name in other.uses]
            also = f", and {', '.join(reading)}, which read it" if reading else ""
            raise ConfigError(
                f"stage {stage.name!r} was made by another command or other files{also}",
                next=f"undo the change (see {out / RECORD}), remove {out / stage.name}, or --out ANOTHER",
            )
    return record


def result_of(folder: Path) -> Path:
    """The model of a stage's folder, or the folder: a run with adapters, a tokenizer, files."""
    return folder / "model" if (folder / "model" / "config.json").is_file() else folder


def results(life: Life) -> dict[str, Path]:
    return {stage.name: result_of(Path(life.out) / stage.name) for stage in life.stages}


def run_stage(
    life: Life, stage: Stage, record: dict[str, Any], key: str, launch: Launch, common: Common
) -> None:
    """Run one stage and note it. A script writes beside its folder, which is renamed when it ends well."""
    folder = Path(life.out) / stage.name
    words = [filled(word, results(life)) for word in stage.words]
    again = stage.name in record["stages"]
    note = record["stages"].setdefault(stage.name, {"seconds": 0.0})
    note |= {"key": key, "finished": False, "command": shlex.join(["unfreeze", *words])}
    if again and (stage.python or words[0] in WHOLE) and has_files(folder):
        note |= {"finished": True, "code": 0}  # killed between its end and this note
        return
    keep(Path(life.out) / RECORD, record)
    began = time.monotonic()
    try:
        if stage.python:
            note["command"] = shlex.join(["python", *words])
            code, result = by_script(["python", *words], folder, launch, common.quiet)
        else:
            code, result = launch([*words, "--out", str(folder)], common.quiet)
    finally:
        note["seconds"] += time.monotonic() - began
        keep(Path(life.out) / RECORD, record)
    if code:
        raise ConfigError(
            f"stage {stage.name!r} failed (exit code {code}); its message is above",
            next="mend it and give the same command again: finished stages stay",
        )
    if result.get("finished") is False:
        raise Stopped
    note |= {"finished": True, "code": code}
    keep(Path(life.out) / RECORD, record)
    if result.get(STOP):
        raise Stopped


def score_stage(life: Life, stage: Stage, record: dict[str, Any], common: Common) -> None:
    """Measure the scores that this stage's model does not have yet."""
    note = record["stages"][stage.name]
    scores = note.setdefault("scores", {})
    out = Path(life.out)
    if stage.run and stage.words[0] in SCORED:
        for score in life.scores:
            if score.name in scores:
                continue
            filled_in = with_paths(score, life)
            one = measured(results(life)[stage.name], filled_in, common)
            scores[score.name] = {"key": score_key(filled_in), **one}
            keep(out / RECORD, record)
            told(common, f"{stage.name}: {score.name} {words_of(one)}")
    keep(out / RECORD, record)


def with_paths(score: Score, life: Life) -> Score:
    """Return the score with the results of stages in place of {NAME}."""
    paths = results(life)
    return score.model_copy(
        update={name: filled(getattr(score, name), paths) for name in ("text", "data", "reward")}
    )


def score_key(score: Score) -> str:
    """Hash of a score's fields and of the content of its files."""
    hashed = hashlib.blake2b(score.model_dump_json().encode(), digest_size=16)
    for name in (score.text, score.data, score.reward.partition(":")[0]):
        if name and Path(name).is_file():
            hashed.update(Path(name).read_bytes())
    return hashed.hexdigest()


def forget_other_scores(life: Life, record: dict[str, Any]) -> None:
    """Drop values of scores whose rows, reward or fields have changed: they are measured again."""
    now = {score.name: score_key(with_paths(score, life)) for score in life.scores}
    for note in record["stages"].values():
        before = note.get("scores", {})
        note["scores"] = {name: one for name, one in before.items() if one.get("key") == now.get(name, "")}


def words_of(one: Mapping[str, Any]) -> str:
    """Words such as '0.931 (0.883 to 0.972)'."""
    return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})"


def shown(note: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's note without the rows of its scores."""
    scores = {name: {k: one[k] for k in ("value", "low", "high")} for name, one in note["scores"].items()}
    return {"seconds": note["seconds"], "command": note["command"], "scores": scores}


def planned(life: Life, record: Mapping[str, Any], common: Common) -> dict[str, Any]:
    """Print the commands as they can be typed, and whether each stage is done."""
    commands: list[dict[str, Any]] = []
    paths = {**results(life), **expected(life, record)}
    for stage in life.stages:
        done = bool(record["stages"].get(stage.name, {}).get("finished"))
        folder, own = str(Path(life.out) / stage.name), [filled(word, paths) for word in stage.words]
        words = shlex.join(["python", *own, folder] if stage.python else ["unfreeze", *own, "--out", folder])
        commands.append({"name": stage.name, "command": words, "done": done})
        if not common.json:
            print(f"{stage.name}{' (done)' if done else ''}\n  {words}")
    return {"stages": commands, "finished": False}


def expected(life: Life, record: Mapping[str, Any]) -> dict[str, Path]:
    """Results of the stages that have not run: <out>/NAME/model where every weight trains."""
    return {
        stage.name: Path(life.out) / stage.name / "model"
        for stage in life.stages
        if stage.name not in record["stages"]
        and stage.run
        and (stage.words[0] == "pretrain" or "--train all" in " ".join(stage.words))
    }


def page_of(life: Life, record: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the page: stages, scores, and groups of stages that begin at one model."""
    notes = {
        stage.name: record["stages"][stage.name]
        for stage in life.stages
        if record["stages"].get(stage.name, {}).get("finished")
    }
    stages = [
        {
            "name": stage.name,
            "about": stage.about,
            "command": notes[stage.name]["command"],
            "time": format_seconds(notes[stage.name]["seconds"]),
            "begins_at": stage.begins_at,
            "report": f"{stage.name}/report.html"
            if (Path(life.out) / stage.name / "report.html").is_file()
            else "",
            "scores": notes[stage.name].get("scores", {}),
        }
        for stage in life.stages
        if stage.name in notes
    ]
    scores = [{"name": score.name, "lower": bool(score.text)} for score in life.scores]
    seconds = format_seconds(sum(note["seconds"] for note in notes.values()))
    title = life.title or "The life of a model"
    groups = groups_of(life.scores, stages)
    return {
        "title": title,
        "stages": stages,
        "scores": scores,
        "seconds": seconds,
        "groups": groups,
        "left": [stage.name for stage in life.stages if stage.name not in notes],
    }


def groups_of(scores: Sequence[Score], stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stages that begin at the same model, each score against that of the model, paired by row."""
    by_name = {stage["name"]: stage for stage in stages}
    starts: dict[str, list[Mapping[str, Any]]] = {}
    for stage in stages:
        if stage["begins_at"] in by_name and stage["scores"]:
            starts.setdefault(stage["begins_at"], []).append(stage)
    groups: list[dict[str, Any]] = []
    for name, members in starts.items():
        if len(members) < 2 or not by_name[name]["scores"]:
            continue
        rows = [(member["name"], *changes(scores, by_name[name], member)) for member in members]
        groups.append({"start": name, "rows": rows})
    return groups


def changes(scores: Sequence[Score], start: Mapping[str, Any], end: Mapping[str, Any]) -> list[str]:
    """Words for each score's change: its difference and interval, or "no difference"."""
    cells: list[str] = []
    for score in scores:
        if score.name not in start["scores"] or score.name not in end["scores"]:
            cells.append(ABSENT)
            continue
        gap, low, high = difference(start["scores"][score.name], end["scores"][score.name])
        value = f"{end['scores'][score.name]['value']:.3f}"
        apart = low > 0 or high < 0
        cells.append(value + (f" ({gap:+.3f}, {low:+.3f} to {high:+.3f})" if apart else " (no difference)"))
    return cells
