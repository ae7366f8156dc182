"""Verdict on a run in one sentence, its evaluations with units, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import NamedTuple, cast

from tyro.conf import FlagConversionOff

from unfreeze.config.names import fields as known_fields
from unfreeze.config.names import short_name
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.errors import UserError
from unfreeze.core.schema import DataEvent, RolloutEvent
from unfreeze.core.units import format_count, format_seconds, plural
from unfreeze.report.events import (
    ENOUGH_STEPS,
    FEW_STEPS,
    TEACH_LITTLE,
    evals_of,
    last,
    number,
    numbers,
    of_kind,
    series,
    times_larger,
    unreached,
    warnings,
)
from unfreeze.report.learnt import finding, risen
from unfreeze.report.metrics import loss_unit
from unfreeze.report.run import RunFolder, flat_fields, flatten
from unfreeze.report.tables import ABSENT

RATE = "optimizer.learning_rate"
UNITS = {  # field of an eval event -> (name, unit): those of core/schema.py, and the demo's scores
    "loss": ("held-out loss", "nats per token"),
    "perplexity": ("held-out perplexity", "exp of the loss"),
    "bits_per_byte": ("held-out bits per byte", "bits per byte of text"),
    "tokens": ("held-out tokens", "tokens"),
    "seconds": ("time of the evaluation", "s"),
    "style": ("style: answers that speak like Yoda", "%"),
    "facts": ("facts: answers with the right fact", "%"),
    "accuracy": ("held-out pairs whose chosen answer has the higher reward", "share"),
    "margin": ("held-out margin of rewards", "nats times beta"),
    "logp_likelier": ("held-out log-probability of the likelier answer", "nats per answer"),
    "rows": ("held-out rows", "rows"),
    "reward": ("held-out reward, mean", "reward"),
    "reward_low": ("held-out reward, lower bound (95 %)", "reward"),
    "reward_high": ("held-out reward, upper bound (95 %)", "reward"),
    **{
        f"pass_{k}{end}": (f"held-out pass@{k}{words}", "share")
        for k in (1, 2, 4)
        for end, words in {"": "", "_low": ", lower bound (95 %)", "_high": ", upper bound (95 %)"}.items()
    },
    "solved": ("held-out prompts with an answer of reward 1 or more", "share"),
    "length": ("held-out answers, mean length", "tokens"),
    "failed": ("held-out answers without a reward", "answers"),
}
NOUNS = {
    "question/answer": "answers",
    "prompt/completion": "answers",
    "instruction/output": "answers",
    "text": "texts",
    "chosen/rejected": "pairs of answers",
}


def evaluations(run: RunFolder) -> dict[str, tuple[list[int], list[float]]]:
    """Return field -> (steps, values) of everything measured in evaluations, in order of appearance.

    Not of a run with rewards: its loss, which is minus the reward, and shares of answers that are always 0.
    """
    evals = evals_of(run.events)
    left = unreached(evals) | ({"loss"} if any("reward" in event for event in evals) else set())
    fields = dict.fromkeys(name for event in evals for name in numbers(event) if name not in left)
    return {name: series(evals, "eval", name) for name in fields}


def verdict(run: RunFolder) -> str:
    """Sentence of judged()."""
    return judged(run)[0]


def judged(run: RunFolder) -> tuple[str, bool]:
    """Return (verdict, True if the run learnt).

    Such as 'tiny-k2 learnt 1,219 answers of yoda.jsonl in 2 min 20 s of training: style 0 → 98 %.'
    "learnt" needs a finished run that saw all of its data, and proof in its events (report/learnt.py):
    held-out loss, or training loss in enough steps. Otherwise the problem follows, with a remedy.
    """
    model, what = _model(run) or "The model", _what(run)
    if not run.train:
        return f"{model} has made no training step.", False
    evidence, time = finding(run), f"{format_seconds(run.seconds)} of training"
    measured = f": {evidence.measured}." if evidence.measured else "."
    if run.state == "done":
        proven = evidence.learnt and any("loss" in event for event in evals_of(run.events))
        # held-out loss that fell beyond its error took enough steps
        few = "" if proven else _rose(run, evidence.note) or _too_few(run)
        learnt = evidence.learnt and not what.seen and not few
        done = what.seen or f"{what.learnt if learnt else 'was trained on'} {what.all}"
        return f"{model} {done} in {time}{measured}{evidence.note}{few}", learnt
    of = f" of {run.steps_planned:,}" if run.steps_planned else ""
    stood = "interrupted" if run.state == "interrupted" else "unfinished"
    stopped = f"{stood} after step {run.steps_done:,}{of} and {time}"
    return f"{model} was trained on {what.all}; {stopped}{measured}{_rose(run)}", False


def subject(run: RunFolder) -> str:
    """Title such as 'tiny-k2 on yoda_train.jsonl', as far as known; else the folder's name."""
    model, data = _model(run), _files(run)
    return " on ".join(part for part in (model, data) if part) or run.name


def _model(run: RunFolder) -> str:
    """Name of the model; a new one has none, and its `model` is its tokenizer's folder."""
    family = run.config.get("shape.family")
    return f"A new {family}{_parts(run)}" if family else Path(run.source("model")).name


def _parts(run: RunFolder) -> str:
    """ " with deep_norm, sliding_window": the parts of a new model; "" if it is as its family."""
    names: dict[str, None] = {}
    for text in cast(Sequence[object], run.config.get("shape.parts") or ()):
        with suppress(ValueError, TypeError, KeyError):
            names[str(json.loads(cast(str, text))["part"])] = None
    return f" with {', '.join(names)}" if names else ""


def _files(run: RunFolder) -> str:
    """Name of the data file, or the number of files; of a pattern, those that it matched."""
    configured = run.config.get("data.files") or run.source("data")
    files = [Path(str(file)).name for file in (configured if isinstance(configured, list) else [configured])]
    data = last(run.events, DataEvent)
    if data is not None and any(map(has_magic, files)):
        files = list(data.get("files", {})) or files
    return files[0] if len(files) == 1 else f"{len(files)} files"


def _too_few(run: RunFolder) -> str:
    """' Too few steps to learn much: --epochs 40.' if the run warned of few steps and made no more."""
    now, before = f"{FEW_STEPS}{run.steps_done} of", f"only {run.steps_done} step"
    for _, words in warnings(run.events):
        if words.startswith(now) or (TEACH_LITTLE in words and before in words):
            return f" Too few steps to learn much: {words.removeprefix(FEW_STEPS).partition(': ')[2]}."
    return ""


def _rose(run: RunFolder, note: str = "") -> str:
    """' The training loss rose by 5.879: the learning rate 2 may be too high. …' if it clearly rose, else "".

    Of few steps at the usual rate or below it is "", as the order of the rows explains a rise. A rate far
    below the usual is not named. note: of the evidence; one that already names the rate is enough.
    """
    ends = risen(run)
    if ends is None or "--learning-rate" in note:
        return ""
    rise, rate = f" The training loss rose by {ends[1] - ends[0]:.3f}", number(run.config.get(RATE))
    if rate is None:
        return f"{rise}. Lower --learning-rate."
    usual = _usual_rate(run)
    if run.steps_done < ENOUGH_STEPS and rate <= usual:
        return ""
    if rate < usual / 10:
        return f"{rise}."
    lower = usual if usual < rate else rate / 10
    return f"{rise}: the learning rate {rate:g} may be too high. Try --learning-rate {lower:g}."


def _usual_rate(run: RunFolder) -> float:
    """Default learning rate of the run's recipe, also if every weight trains."""
    kind = CONFIGS.get(str(run.config.get("recipe")), CONFIGS["sft"])
    usual = known_fields(kind)[RATE].info.default
    if run.config.get("train") == "all":
        with suppress(ValueError, UserError):  # fields that are missing here
            usual = kind.completed({"train": "all"}).get(RATE, usual)
    return float(usual)


class _Data(NamedTuple):
    """Words on the data. all: '1,219 answers of yoda_train.jsonl'. seen: 'saw about 370 of …', or ""."""

    all: str
    seen: str = ""
    learnt: str = "learnt"


def _what(run: RunFolder) -> _Data:
    """Words on the data; only the file's name without a data event."""
    where = _files(run)
    account = last(run.events, DataEvent)
    if account is None or "examples" not in account:
        return _Data(where or "its data")
    shapes = account.get("shapes", {})
    nouns = {NOUNS.get(shape, "answers" if shape.endswith("/label") else "conversations") for shape in shapes}
    noun = nouns.pop() if len(nouns) == 1 else "documents"
    labels = (
        run.config.get("preference.loss") == "kto"
    )  # both answers of a pair are documents, each with its label
    noun = "labelled answers" if labels else noun
    # for a run that stopped within its first epoch: the part of the data that it saw
    trained, there = sum(event.get("tokens") or 0 for event in run.train), account.get("tokens") or 0
    more = times_larger(account)  # assume that rows not yet encoded are like the others
    there *= more * (1 + labels)  # KTO also pairs each prompt with another's answer (packing/answers.py)
    # rows held out by fraction are not trained on; a validation file is not counted in `examples`
    held_out = account.get("held_out", 0) if run.config.get("data.validation_fraction") else 0
    count = round(account["examples"] * more) - held_out
    there *= count / max(count + held_out, 1)
    whole = f"{count:,} {noun}" + (f" of {where}" if where else "")
    if rolled := of_kind(run.events, RolloutEvent):  # a step answers some; it learns not about these alone
        prompts = min(count, sum(event["groups"] for event in rolled))
        of = f"{prompts:,} of {count:,}" if prompts < count else f"{count:,}"
        return _Data(f"rewards of answers to {of} prompts of {where}", learnt="learnt from")
    if 0 < trained < 0.9 * there and run.config.get("data.weights"):  # rows of some files repeat
        return _Data(whole, f"saw {format_count(trained)} tokens, mixed from {whole},")
    if 0 < trained < 0.9 * there:
        return _Data(whole, f"saw about {round(count * trained / there):,} of {whole} once")
    return _Data(whole)


EVALUATION_HEAD = ("what", "unit", "first", "last", "best")
LOWER = ("loss", "perplexity", "bits_per_byte")  # lower is better
BESIDE = ("rows", "tokens", "seconds")  # size and duration of an evaluation, not results


def evaluation_rows(run: RunFolder) -> list[tuple[str, ...]]:
    """One row per measure in EVALUATION_HEAD's order; the best value has its step if it is not the last."""
    rows = []
    for name, (steps, ys) in evaluations(run).items():
        if name in BESIDE:
            continue
        what, unit = UNITS.get(name, (name, ""))
        unit = loss_unit(run.events).replace("supervised ", "") if name == "loss" else unit
        best = (min if name in LOWER else max)(range(len(ys)), key=ys.__getitem__)
        first = f"{ys[0]:.4g}" if len(ys) > 1 else ABSENT
        differs = ys[best] != ys[-1]
        rows.append(
            (
                what,
                unit,
                first,
                f"{ys[-1]:.4g}",
                f"{ys[best]:.4g} (step {steps[best]:,})" if differs else ABSENT,
            )
        )
    return rows


def evaluation_note(run: RunFolder) -> str:
    """'Steps 0 to 50, on 38 rows with 1,143 supervised tokens, 0.9 s each.', as far as known."""
    evals = evals_of(run.events)
    if not evals:
        return ""
    values = {name: ys[-1] for name in BESIDE if (ys := series(evals, "eval", name)[1])}
    parts = [
        f"Steps {evals[0]['step']:,} to {evals[-1]['step']:,}"
        if len(evals) > 1
        else f"Step {evals[0]['step']:,}"
    ]
    rows = [plural(int(values["rows"]), "row")] if "rows" in values else []
    tokens = [f"{values['tokens']:,.0f} supervised tokens"] if "tokens" in values else []
    parts += [f"on {' with '.join(rows + tokens)}"] if rows or tokens else []
    parts += [f"{format_seconds(values['seconds'])} each"] if "seconds" in values else []
    return f"{', '.join(parts)}."


def rerun_command(run: RunFolder, here: Path | None = None) -> str:
    """Command that repeats this run in another folder; "" without a resolved config.

    here: directory where it will be run; paths below it become relative.
    Includes only fields that differ from their defaults if the run recorded them ("given"), else all.
    """
    recipe = run.config.get("recipe")
    if not isinstance(recipe, str):
        return ""
    effective = run.config.get("effective")
    set_fields = effective.get("given") if isinstance(effective, dict) else None
    fields = flat_fields(
        {name: value for name, value in run.config.items() if name not in ("recipe", "effective", "out")}
    )
    words = ["unfreeze", recipe]
    config = CONFIGS.get(recipe, CONFIGS["sft"])
    by_path = {known.path: known for known in known_fields(config).values()}
    for name, value in fields.items():
        if (isinstance(set_fields, list) and name not in set_fields) or value in (None, "", [], {}):
            continue
        known = by_path.get(name)
        if (
            known is not None
            and known.info.annotation is bool
            and FlagConversionOff not in known.info.metadata
        ):
            words += [f"--{known.short.replace('_', '-')}"] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        words += [
            f"--{short_name(config, name).replace('_', '-')}",
            *(_near(str(item), here) for item in values),
        ]
    out = _near(str(run.config.get("out") or f"runs/{run.name}"), here)
    return shlex.join([*words, "--out", f"{out}-again"])


def _near(word: str, here: Path | None) -> str:
    """Make a path below `here` relative; return any other word unchanged."""
    path = Path(word)
    inside = here is not None and path.is_absolute() and here in path.parents
    return str(path.relative_to(here)) if here and inside else word


def machine_rows(run: RunFolder) -> list[tuple[str, str]]:
    """(name, value) of the machine and versions, as far as plan and config have them."""
    effective = run.config.get("effective")
    effective = effective if isinstance(effective, dict) else {}
    rows = []
    if lines := run.plan.get("lines") if run.plan else None:
        rows.append(("Machine", lines[0].removeprefix("plan for ")))
    for name, title in (("device", "Device"), ("machine", "System"), ("versions", "Versions")):
        if value := effective.get(name):
            rows.append(
                (
                    title,
                    (
                        ", ".join(f"{key} {of}" for key, of in flatten(value).items())
                        if isinstance(value, dict)
                        else str(value)
                    ),
                )
            )
    return rows
