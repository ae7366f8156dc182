"""Held-out rows for `unfreeze merge`: those that the run held out, or --data, read as the run read them.

A run that reads large files in windows splits rows by a hash of their bytes, any other run by a hash of their
content (docs/reference/data.md). Rows are split here by the rule that the run used.
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

TOKENS = 2048  # per batch
GIVE = "Give --data HELD_OUT.jsonl"
PREFERENCE = {f"preference.{name}" for name in Preference.model_fields}


@dataclass(frozen=True)
class HeldoutRows:
    """Held-out rows and how to encode them (fields of resolved_config.json).

    fraction    share of `files` that was held out; 0: all rows
    columns     column names in `files`
    beside      training files of a run that found validation rows among them; these rows are left out
    trained_on  warning that the run trained on one of the files; "" if not
    own         True if the user named the files: then a fault in them is an error
    windows     True if the run read `files` in windows; None if its record does not say
    cursor      of the run's latest save; a run with rewards has hashes of its code there
    """

    files: tuple[str, ...]
    fraction: float
    resolved: dict[str, Any]
    columns: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    trained_on: str = ""
    own: bool = False
    windows: bool | None = None
    cursor: dict[str, Any] | None = None

    @property
    def rewarded(self) -> bool:
        """True for a run of `unfreeze grpo`, whose rows are prompts."""
        return self.resolved.get("recipe") == "grpo"

    def paths(self, say: Callable[[str], None]) -> list[Path]:
        """Return the files. Raises ConfigError if one is missing."""
        from unfreeze.data.rows.sources import files_of

        try:
            return [path for name in self.files for path in files_of(name, "data", say)]
        except ConfigError as error:
            raise ConfigError(error.message, next=GIVE) from None

    def tokenizer(self, manifest: Manifest) -> Tokenizer:
        """Return the checkpoint's tokenizer, with the date and the variables of the run's template."""
        from unfreeze.data import load_tokenizer

        return load_tokenizer(
            manifest.tokens,
            base=manifest.path,
            now=template_time(str(self.resolved.get("data.template_date") or "")),
            template_variables=template_values(self.resolved.get("data.template_variables") or ()),
        )

    def longest(self, max_positions: int) -> int:
        """Return the longest row in tokens."""
        effective: dict[str, Any] = self.resolved.get("effective") or {}
        return min(int(effective.get("sequence_length") or TOKENS), max_positions)

    @property
    def preference(self) -> Preference | None:
        """Preference settings of a run of `unfreeze prefer`; None for other runs."""
        if self.resolved.get("recipe") != "prefer":
            return None
        own = {name.partition(".")[2]: value for name, value in self.resolved.items() if name in PREFERENCE}
        return Preference(**own)


def heldout_rows(run: Path, data: str, columns: tuple[str, ...] = ()) -> HeldoutRows | str:
    """Return the rows of `data`, or those that the run held out, or a reason for none. Reads no row."""
    from unfreeze.generate.source import run_of

    run = run_of(run)
    resolved = read_resolved(run, ConfigError) if (run / RESOLVED).is_file() else {}
    if data:
        trained_on = _trained_on(data, resolved)
        return HeldoutRows(
            (data,), 0.0, resolved, columns, trained_on=trained_on, own=True, cursor=_cursor(run)
        )
    if not resolved:
        return f"{run} is an adapter without its run. {GIVE}"
    columns = tuple(resolved.get("data.columns") or ())
    if resolved.get("data.validation"):
        leaks = _leaks(run)
        later = "; ".join(words for words in leaks if words.startswith(AT_LEAST))
        beside = _names(resolved.get("data.files") or []) if leaks else ()
        held = _names(resolved["data.validation"])
        cursor = _cursor(run)
        windows = _windows(cursor) if leaks else None
        return HeldoutRows(held, 0.0, resolved, columns, beside, later, windows=windows, cursor=cursor)
    fraction = resolved.get("data.validation_fraction")
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        return f"this run held out no rows. {GIVE}"
    cursor, files = _cursor(run), _names(resolved.get("data.files"))
    return HeldoutRows(files, fraction, resolved, columns, windows=_windows(cursor), cursor=cursor)


def _leaks(run: Path) -> list[str]:
    """Warnings of the run about held-out rows that it trained on."""
    path = run / "events.jsonl"
    return [words for _, words in warnings(read_events(path)) if LEAKED in words] if path.is_file() else []


def _cursor(run: Path) -> dict[str, Any] | None:
    """Return the cursor of the latest save; None if the run has no save."""
    from unfreeze.train.run import latest, read_record

    save = latest(run)
    return read_record(save).get("cursor") if save else None


def _windows(cursor: dict[str, Any] | None) -> bool | None:
    """True if the run read its rows in windows, by its latest save; None if it has no save."""
    return None if cursor is None else "window" in cursor


def _trained_on(data: str, resolved: dict[str, Any]) -> str:
    """Return a warning if the run trained on `data` or on a file with the same bytes, else ""."""
    own = Path(data)
    for name in _names(resolved.get("data.files") or []):
        other = Path(name)
        if name == data or (own.is_file() and other.is_file() and cmp(own, other, shallow=False)):
            return f"the run trained on {name}: the figures on it show what the model memorised"
    return ""


def _names(value: object) -> tuple[str, ...]:
    """Names from resolved_config.json, which holds one name or a list."""
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def encode_as_run(
    rows: HeldoutRows, manifest: Manifest, max_positions: int, say: Callable[[str], None]
) -> Examples | str:
    """Encode the rows as the run did; return a reason if the run's held-out rows are gone.

    Raises ConfigError if --data is missing, DataError for a bad row in it.
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
    from unfreeze.data import encoded_files, split_by_content

    resolved, files = rows.resolved, rows.paths(say)
    names = ("truncation", "on_bad_row", "turns", "reasoning")
    options: dict[str, Any] = {name: resolved[f"data.{name}"] for name in names if f"data.{name}" in resolved}
    options |= {"columns": rows.columns, "answers": answers_for(rows, files)}
    if rows.rewarded:
        options["room"] = int(resolved["rollout.max_new_tokens"])
    tokenizer, length = rows.tokenizer(manifest), rows.longest(max_positions)
    if rows.fraction and (heldout := _of_windows(rows, files, tokenizer, length, options)) is not None:
        return heldout
    examples = encoded_files(files, tokenizer, length, **options).examples
    if rows.beside:
        taught = partial(encoded_files, tokenizer=tokenizer, sequence_length=length, **options)
        return _left_over(rows, examples, files, taught, say)
    if not rows.fraction:
        return examples
    return split_by_content(examples, rows.fraction, int(resolved.get("seed") or 0))[1]


def _left_over(
    rows: HeldoutRows,
    examples: Examples,
    files: Sequence[Path],
    taught: Callable[[Sequence[Path]], Dataset],
    say: Callable[[str], None],
) -> Examples:
    """Drop the rows that the run trained on, by the run's own rule (job/data.py)."""
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
    words = f"{leaked_N.sum():,} of {len(leaked_N):,} {LEAKED}"
    if leaked_N.all():
        raise ConfigError(words)
    if leaked_N.any():
        say(f"{words}: left out")
    return examples.part(~leaked_N)


def answers_for(rows: HeldoutRows, files: Sequence[Path]) -> Answers:
    """Return the row kind of the run; --data without pairs or labels counts as "taught"."""
    from unfreeze.data.rows.kind import answers_in

    if rows.rewarded:
        return "asked"
    if rows.preference is None:
        return "taught"
    if rows.own and answers_in(files, rows.columns) == "taught":
        return "taught"
    return answers_of(rows.preference)


def _of_windows(
    rows: HeldoutRows, files: Sequence[Path], tokenizer: Tokenizer, length: int, options: dict[str, Any]
) -> Examples | None:
    """Rows held out of files that the run read in windows; None if it read them whole.

    If no save says which, decide as the run did: windows for many rows, given steps, and no file weights.
    """
    from unfreeze.data import Examples
    from unfreeze.data.store.streamed import streamed_files

    resolved, windows = rows.resolved, False if rows.rewarded else rows.windows
    if windows is None:
        windows = resolved.get("training.steps") is not None and not resolved.get("data.weights")
    if not windows:
        return None
    stream = streamed_files(
        files,
        tokenizer,
        length,
        least=0 if rows.windows else MANY_ROWS,
        tokens_per_step=TOKENS,
        seed=int(resolved.get("seed") or 0),
        validation_fraction=rows.fraction,
        **options,
    )
    if stream is None:
        return None
    try:
        return Examples.of(list(stream.validation or ()))
    finally:
        stream.close()
