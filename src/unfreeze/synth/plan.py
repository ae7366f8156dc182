"""The folder of a plan: what is asked, what it costs at worst, and the ceiling.

PLAN/plan.json       seeds, recipe, server, prices, ceiling, and hashes of the two files
PLAN/ledger.jsonl    what was booked (teach/ledger.py)
PLAN/answers.jsonl   the answers that came
PLAN/rows.jsonl      the rows made of them, and PLAN/left_out.jsonl: those left out, each with its reason

    worst case = attempts × Σ over requests (
        price.read × prompt tokens + price.written × (max_tokens + reasoning tokens))

An attempt that fails may be billed: a server may have computed an answer that did not arrive. So each counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.files import write_file
from unfreeze.core.units import plural
from unfreeze.core.whole_lines import whole_lines
from unfreeze.synth.judging import most_of
from unfreeze.synth.prompts import Requests, read_seeds
from unfreeze.synth.recipe import Recipe, digest_of, read_recipe
from unfreeze.synth.validate import refuse_unable
from unfreeze.teach.address import base_url
from unfreeze.teach.answers import Answer
from unfreeze.teach.budget import Price
from unfreeze.teach.ledger import NAME, Booked
from unfreeze.teach.once import read_kept
from unfreeze.untrusted.json_object import read_object

FILE, ANSWERS, ROWS, LEFT_OUT = "plan.json", "answers.jsonl", "rows.jsonl", "left_out.jsonl"
FORMAT = 1
AGAIN = "unfreeze synth plan"


@dataclass(frozen=True)
class Plan:
    """A plan. seeds, recipe: absolute paths; *_hash: of their content; requests, read, written: at most."""

    seeds: str
    seeds_hash: str
    recipe: str
    recipe_hash: str
    endpoint: str
    model: str
    budget_usd: float
    price_read: float | None
    price_written: float | None
    requests: int
    read: int
    written: int
    worst_usd: float

    @property
    def price(self) -> Price:
        """USD per million tokens."""
        return Price(self.price_read, self.price_written)

    @property
    def identity(self) -> str:
        """Hash of what is asked of whom: the plan's id in rows."""
        words = json.dumps([self.seeds_hash, self.recipe_hash, self.endpoint, self.model])
        return hashlib.sha256(words.encode()).hexdigest()[:16]


def make_plan(
    seeds: Path, recipe_file: str, changed: dict[str, Any], out: str, say: Callable[[str], None]
) -> tuple[Plan, Path]:
    """Price a plan, say it, and write its folder; nothing is sent.

    changed: fields of the recipe that the command line changes. out: the folder; "": named after the recipe.
    Raises ConfigError if the price is unknown or the worst case is above the ceiling; then nothing is
    written.
    """
    recipe = read_recipe(recipe_file).model_copy(update=changed)
    if not recipe.endpoint:
        raise ConfigError(
            "synth plan needs the address of a server", next="--endpoint http://127.0.0.1:8000/v1"
        )
    url = base_url(recipe.endpoint)
    recipe = recipe.model_copy(update={"endpoint": url})
    refuse_unable(recipe.check)
    requests = Requests(recipe, read_seeds(seeds), seeds.name)
    plan = Plan(
        str(seeds.resolve()),
        file_hash(seeds),
        str(Path(recipe_file).resolve()),
        file_hash(Path(recipe_file)),
        url,
        recipe.model,
        recipe.budget_usd,
        recipe.price_read,
        recipe.price_written,
        *(whole := most_of(requests, {})),
        Price(recipe.price_read, recipe.price_written).of(*whole[1:]),
    )
    folder = Path(out or f"{Path(recipe_file).stem}-{plan.identity[:8]}.plan")
    if (folder / FILE).is_file():
        _refuse_other_bill(folder, read_plan(folder), plan)
    known = read_kept(folder / ANSWERS)
    _, read, written = most_of(requests, known)
    say(_asked_words(requests, known))
    line = Booked(folder, plan.budget_usd, plan.price).worst(url, read, written)
    say(line or f"{read:,} tokens read and {written:,} written at most; nobody bills for them")
    return plan, folder


def write_plan(plan: Plan, folder: Path) -> None:
    """Write plan.json, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / FILE, json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n")


def read_plan(folder: Path) -> Plan:
    """Read a plan's folder. Raises ConfigError if it is none."""
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"{folder} is no plan: it has no {FILE}", next="unfreeze synth plan seeds.jsonl --recipe r.toml"
        )
    held = read_object(folder / FILE, ConfigError)
    if held.pop("format", None) != FORMAT:
        raise ConfigError(f"{folder / FILE} is of another version", next=f"{AGAIN}, with another --out")
    try:
        return Plan(**held)
    except TypeError:
        raise ConfigError(f"{folder / FILE} is no plan", next=f"{AGAIN}, with another --out") from None


def opened(plan: Plan, folder: Path) -> tuple[Recipe, Requests]:
    """Return what a plan asks. Raises ConfigError if its seeds or its recipe have changed since."""
    for name, path, known in (
        ("seeds", plan.seeds, plan.seeds_hash),
        ("recipe", plan.recipe, plan.recipe_hash),
    ):
        if not Path(path).is_file():
            raise ConfigError(f"the {name} of {folder} are gone: {path}", next="put the file back")
        if file_hash(Path(path)) != known:
            raise ConfigError(
                f"the {name} ({path}) changed since {folder} was priced",
                next=f"{AGAIN} again, with --out {folder}: answers that are there are not asked again",
            )
    money = {
        "budget_usd": plan.budget_usd,
        "price_read": plan.price_read,
        "price_written": plan.price_written,
    }
    recipe = read_recipe(plan.recipe)
    recipe = recipe.model_copy(update={**money, "endpoint": plan.endpoint, "model": plan.model})
    return recipe, Requests(recipe, read_seeds(Path(plan.seeds)), Path(plan.seeds).name)


def recipe_hash(recipe: Recipe) -> str:
    """Return a short hash of a recipe with its changes, for rows."""
    return hashlib.sha256(digest_of(recipe).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def file_hash(path: Path) -> str:
    """Return a file's SHA-256."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", next="check the path") from None


def _asked_words(requests: Requests, known: Mapping[str, Answer]) -> str:
    missing = sum(request.key not in known for request in requests.first)
    there = len(requests.first) - missing
    words = f"{plural(len(requests.seeds), 'seed')}, {plural(missing, 'request')}"
    words += f" ({there:,} more have their answer)" if there else ""
    words += f", {2 * len(requests.seeds):,} of a judge" if requests.judges else ""
    words += f"; {requests.repeated:,} seeds repeat another's request" if requests.repeated else ""
    return f"{words}; at most {requests.recipe.tries} attempts each, any of which may be billed"


def _refuse_other_bill(folder: Path, before: Plan, now: Plan) -> None:
    """Raise ConfigError if what was booked in this folder had another price or another server."""
    for name in ("endpoint", "price_read", "price_written"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new and whole_lines(folder / NAME):
            raise ConfigError(
                f"{folder} has bookings with {name} = {old}, but now it is {new}",
                next=f"{AGAIN} with another --out",
            )
