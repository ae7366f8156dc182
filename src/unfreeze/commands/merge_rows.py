"""The held-out rows of `unfreeze merge`: those that the run held out, or --data, read as the run read them.

A run that reads large files in windows draws a row's side from its bytes, any other from what it says
(docs/reference/data.md); so rows are found by the rule that the run used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from filecmp import cmp
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.prefer import Preference
from unfreeze.config.recipes import read_resolved
from unfreeze.config.template import template_time, template_values
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.events import RESOLVED
from unfreeze.job.opening.streaming import MANY_ROWS
from unfreeze.report.events import AT_LEAST, LEAKED, read_events, warnings
from unfreeze.teach.compares import answers_of

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Dataset, Examples, Tokenizer
    from unfreeze.data.rows.row import Answers

TOKENS = 2048  # of a batch
GIVE = "Give --data HELD_OUT.jsonl"
PREFERENCE = {f"preference.{name}" for name in Preference.model_fields}


@dataclass(frozen=True)
class HeldoutRows:
    """Held-out rows: whose, and how they are encoded (fields of resolved_config.json).

    fraction    of `files` that was held out; 0: all of them
    columns     of `files`, where they are the user's own
    beside      what the run trained on, where it found rows of that among them: these are left out
    trained_on  what is wrong with them: the run learned from a file among them; "" where none is known
    own         whether the user named them: then what is wrong with them is an error
    windows     whether the run read `files` in windows; None: its record does not say
    """

    files: tuple[str, ...]
    fraction: float
    resolved: dict[str, Any]
    columns: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    trained_on: str = ""
    own: bool = False
    windows: bool | None = None

    @property
    def preference(self) -> Preference | None:
        """What a run of `unfreeze prefer` minimised; None of the others."""
        if self.resolved.get("recipe") != "prefer":
            return None
        own = {name.partition(".")[2]: value for name, value in self.resolved.items() if name in PREFERENCE}
        return Preference(**own)


def heldout_rows(run: Path, data: str, columns: tuple[str, ...] = ()) -> HeldoutRows | str:
    """The rows of `data`, or those that the run held out; else why there are none. No row is read."""
    from unfreeze.generate.source import run_of

    run = run_of(run)
    resolved = read_resolved(run, ConfigError) if (run / RESOLVED).is_file() else {}
    if data:
        trained_on = _trained_on(data, resolved)
        return HeldoutRows((data,), 0.0, resolved, columns, trained_on=trained_on, own=True)
    if not resolved:
        return f"{run} is an adapter without its run. {GIVE}"
    columns = tuple(resolved.get("data.columns") or ())
    if resolved.get("data.validation"):
        found = _leaks(run)
        later = "; ".join(words for words in found if words.startswith(AT_LEAST))
        beside = _names(resolved.get("data.files") or []) if found else ()
        held = _names(resolved["data.validation"])
        return HeldoutRows(
            held, 0.0, resolved, columns, beside, later, windows=_windows(run) if found else None
        )
    fraction = resolved.get("data.validation_fraction")
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        return f"this run held out no rows. {GIVE}"
    return HeldoutRows(_names(resolved.get("data.files")), fraction, resolved, columns, windows=_windows(run))


def _leaks(run: Path) -> list[str]:
    """What the run said of held-out rows that it trained on."""
    path = run / "events.jsonl"
    return [words for _, words in warnings(read_events(path)) if LEAKED in words] if path.is_file() else []


def _windows(run: Path) -> bool | None:
    """Whether the run read its rows in windows, by its latest save; None where it has none."""
    from unfreeze.train.run import latest, read_record

    save = latest(run)
    cursor = read_record(save).get("cursor") if save else None
    return None if cursor is None else "window" in cursor


def _trained_on(data: str, resolved: dict[str, Any]) -> str:
    """What to warn of where a run's record names `data`, or a file of the same bytes, as what it learned."""
    own = Path(data)
    for name in _names(resolved.get("data.files") or []):
        other = Path(name)
        if name == data or (own.is_file() and other.is_file() and cmp(own, other, shallow=False)):
            return f"the run trained on {name}: the loss on it shows what was learned by heart"
    return ""


def _names(value: object) -> tuple[str, ...]:
    """One name or several, as resolved_config.json has them."""
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def encode_as_run(
    rows: HeldoutRows, manifest: Manifest, max_positions: int, say: Callable[[str], None]
) -> Examples | str:
    """The rows as the run encoded them; why not, where those that it held out cannot be had any more.

    Raises ConfigError where --data is not there, DataError for a bad row in it.
    """
    try:
        return _encoded(rows, manifest, max_positions, say)
    except UserError as error:
        if rows.own:
            raise
        return f"{error.message}. {GIVE}"


def _encoded(
    rows: HeldoutRows, manifest: Manifest, max_positions: int, say: Callable[[str], None]
) -> Examples:
    from unfreeze.data import encoded_files, load_tokenizer, split_by_content
    from unfreeze.data.rows.sources import files_of

    of = rows.resolved
    try:
        files = [path for name in rows.files for path in files_of(name, "data", say)]
    except ConfigError as error:
        raise ConfigError(error.message, next=GIVE) from None
    names = ("truncation", "on_bad_row", "turns", "reasoning")
    options: dict[str, Any] = {name: of[f"data.{name}"] for name in names if f"data.{name}" in of}
    options |= {"columns": rows.columns, "answers": answers_for(rows, files)}
    tokenizer = load_tokenizer(
        manifest.path,
        now=template_time(str(of.get("data.template_date") or "")),
        template_variables=template_values(of.get("data.template_variables") or ()),
    )
    effective: dict[str, Any] = of.get("effective") or {}
    length = min(int(effective.get("sequence_length") or TOKENS), max_positions)
    if rows.fraction and (found := _of_windows(rows, files, tokenizer, length, options)) is not None:
        return found
    examples = encoded_files(files, tokenizer, length, **options).examples
    if rows.beside:
        taught = partial(encoded_files, tokenizer=tokenizer, sequence_length=length, **options)
        return _left_over(rows, examples, files, taught, say)
    if not rows.fraction:
        return examples
    return split_by_content(examples, rows.fraction, int(of.get("seed") or 0))[1]


def _left_over(
    rows: HeldoutRows,
    examples: Examples,
    files: Sequence[Path],
    taught: Callable[[Sequence[Path]], Dataset],
    say: Callable[[str], None],
) -> Examples:
    """Those that the run did not train on, found as it found them (job/data.py)."""
    from unfreeze.data.rows.files import reader
    from unfreeze.data.rows.scan import Repeated
    from unfreeze.data.rows.sources import files_of

    trained = [path for name in rows.beside for path in files_of(name, "data", say)]
    if rows.windows:
        look = Repeated(files, rows.columns)
        for path in trained:
            for _, raw in reader(path, rows.columns).rows():
                look(raw)
        leaked_N = examples.made_of(look.found)
    else:
        leaked_N = replace(taught(trained), validation=examples).leaked()
    said = f"{leaked_N.sum():,} of {len(leaked_N):,} {LEAKED}"
    if leaked_N.all():
        raise ConfigError(said)
    if leaked_N.any():
        say(f"{said}: left out")
    return examples.part(~leaked_N)


def answers_for(rows: HeldoutRows, files: Sequence[Path]) -> Answers:
    """How the run read its rows; rows of the user's own that have no pairs or labels are taught ones."""
    from unfreeze.data.rows.kind import answers_in

    if rows.preference is None:
        return "taught"
    if rows.own and answers_in(files, rows.columns) == "taught":
        return "taught"
    return answers_of(rows.preference)


def _of_windows(
    rows: HeldoutRows, files: Sequence[Path], tokenizer: Tokenizer, length: int, options: dict[str, Any]
) -> Examples | None:
    """What was held out of files that the run read in windows; None where it read them whole.

    Where no save says which, as the run decided it: many rows, a number of steps, no weights of files.
    """
    from unfreeze.data import Examples
    from unfreeze.data.store.streamed import streamed_files

    of, windows = rows.resolved, rows.windows
    if windows is None:
        windows = of.get("training.steps") is not None and not of.get("data.weights")
    if not windows:
        return None
    stream = streamed_files(
        files,
        tokenizer,
        length,
        least=0 if rows.windows else MANY_ROWS,
        tokens_per_step=TOKENS,
        seed=int(of.get("seed") or 0),
        validation_fraction=rows.fraction,
        **options,
    )
    if stream is None:
        return None
    try:
        return Examples.of(list(stream.validation or ()))
    finally:
        stream.close()
