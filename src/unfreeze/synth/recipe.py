"""Fields of a synthesis recipe.

# yoda.toml
prompt = "Say this the way Yoda speaks, and nothing else: {answer}"
row_prompt = "{question}"
max_tokens = 200
"""

# A Config is frozen, so its fields may have other defaults; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from unfreeze.config.endpoint import Asked
from unfreeze.config.parse import Files, Folder, Frozen, from_file
from unfreeze.core.errors import ConfigError, looked_in, nearest
from unfreeze.untrusted.json_object import parse_object
from unfreeze.untrusted.pattern import pattern

EXAMPLE = 'prompt = "Answer in one sentence: {question}"'
OWN = ("messages", "model", "max_tokens", "max_completion_tokens", "n", "best_of", "stream", "tools")
"""Fields of a request that decide its price or form: `extra` may not change them."""
Kind = Literal["messages", "pairs", "labels"]


class Rejected(Frozen):
    """The second answer of a pair, where no judge compares the two; each field is the first's by default."""

    prompt: str = Field(default="", description="prompt of the answer that is rejected")
    system: str = Field(default="", description="its system text")
    temperature: float | None = Field(default=None, ge=0, description="its temperature")


class Judged(Frozen):
    """A judge of pairs or of labels, on the same server and at the same price."""

    rubric: str = Field(default="", description="what makes an answer good, in words for the judge")
    model: str = Field(default="", description="the judge's model name; empty: the recipe's")
    max_tokens: int = Field(default=512, ge=8, description="most tokens of a verdict")
    least: float = Field(
        default=5.0, ge=0, le=10, description="labels: the least score, 0 to 10, of a good one"
    )


class Check(Frozen):
    """Requirements for an answer; one that fails is left out, with its reason."""

    least_chars: int = Field(default=1, ge=1, description="least characters of an answer")
    most_chars: int = Field(default=100_000, ge=1, description="most characters of an answer")
    form: Literal["text", "json"] = Field(default="text", description="json: the answer is one JSON object")
    regex: str = Field(default="", description="pattern that the answer must contain")
    forbid: tuple[str, ...] = Field(default=(), description="texts that it must not contain, in any case")
    language: str = Field(default="", description="language of the answer, such as en or zh; empty: any")
    near: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="similarity (Jaccard, of 5 words) at which a row repeats another; 1: only equal rows",
    )
    against: Files = Field(
        default=(), description="evaluation sets: a row that shares 13 words in a row with one is left out"
    )


class Recipe(Asked):
    """A recipe. The server's key comes from the environment variable OPENAI_API_KEY."""

    prompt: str = Field(description="what is asked of each seed; {field} is replaced by the seed's field")
    system: str = Field(default="", description="system text before it")
    kind: Kind = Field(
        default="messages",
        description="messages: rows for sft. pairs: two answers, for prefer. labels: a judge's verdict on a"
        " seed's own answer, the field completion",
    )
    row_prompt: str = Field(default="", description="the user's turn of a row; empty: the prompt itself")
    row_system: str = Field(default="", description="the system's turn of a row; empty: none")
    endpoint: str = Field(default="", description="address of an OpenAI-compatible server")
    model: str = Field(default="", description="the model's name on the server; empty: the server's default")
    samples: int = Field(default=1, ge=1, le=64, description="answers to each seed, for messages")
    max_tokens: int = Field(default=1024, ge=1, description="most tokens of an answer, reasoning included")
    reasoning_tokens: int = Field(
        default=0,
        ge=0,
        description="most tokens of reasoning, where the server does not count it in max_tokens",
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="how the server calls that limit"
    )
    temperature: float = Field(default=0.7, ge=0, description="of sampling")
    top_p: float = Field(default=1.0, gt=0, le=1, description="of sampling")
    seed: int = Field(default=0, ge=0, description="seed of the first sample; each further one adds 1")
    extra: str = Field(default="", description="more fields of each request, as a JSON object")
    reasoning: Literal["keep", "drop", "require"] = Field(
        default="keep", description="the answer's reasoning; require: an answer without it is left out"
    )
    least_reasoning: int = Field(default=0, ge=0, description="least characters of the reasoning")
    most_reasoning: int = Field(default=1_000_000, ge=0, description="most characters of the reasoning")
    retries: int = Field(
        default=2, ge=0, le=10, description="further attempts of a request that fails; each may be billed"
    )
    at_once: int = Field(default=8, ge=1, le=256, description="requests at the same time")
    tokenizer: Folder = Field(
        default="", description="folder with the model's tokenizer, to count tokens; empty: a token a byte"
    )
    read_beside: int = Field(
        default=128, ge=0, description="tokens that the server's own template adds to a request, at most"
    )
    trust_usage: bool = Field(
        default=False, description="lower what is booked to the usage that the server gives"
    )
    batch_requests: int = Field(default=50_000, ge=1, description="most requests of a batch file")
    batch_bytes: int = Field(default=500_000_000, ge=10_000, description="most bytes of a batch file")
    rejected: Rejected = Field(default=Rejected(), description="the second answer of a pair")
    judge: Judged = Field(default=Judged(), description="who compares pairs or grades")
    check: Check = Field(default=Check(), description="what an answer must be")

    @property
    def tries(self) -> int:
        """Attempts of a request."""
        return 1 + self.retries

    @property
    def written(self) -> int:
        """Most tokens that an answer is billed for."""
        return self.max_tokens + self.reasoning_tokens

    @property
    def more(self) -> dict[str, Any]:
        """`extra` as an object."""
        return (
            parse_object(self.extra.encode(), "extra", ConfigError, next="extra = '{}'") if self.extra else {}
        )


def read_recipe(written: str) -> Recipe:
    """Read a recipe's file. Raises ConfigError if it is missing, or has a field that cannot be used."""
    path = Path(written)
    if not path.is_file():
        others = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"there is no recipe {written}{looked_in(written)}{nearest(path.name, others)}",
            next=f"a file with {EXAMPLE}, or one of examples/synth",
        )
    recipe = from_file(Recipe, path, EXAMPLE)
    for fault, next in _faults(recipe):
        raise ConfigError(f"{path}: {fault}", next=next)
    return recipe


def _faults(recipe: Recipe) -> list[tuple[str, str]]:
    """Return what does not go together, each with a remedy."""
    faults: list[tuple[str, str]] = []
    if own := [name for name in recipe.more if name in OWN]:
        faults.append(
            (f"extra holds {own[0]!r}, which decides the price", "use the recipe's own field, or none")
        )
    if recipe.kind == "labels" and not recipe.judge.rubric:
        faults.append(("kind = labels needs a rubric", '[judge] rubric = "10: right, and short. 0: wrong."'))
    alike = recipe.rejected == Rejected() and not recipe.judge.rubric
    if recipe.kind == "pairs" and alike:
        faults.append(
            (
                "kind = pairs needs a judge, or another second answer",
                "[judge] rubric, or [rejected] temperature",
            )
        )
    if recipe.kind != "messages" and recipe.samples > 1:
        faults.append((f"samples = {recipe.samples} is for kind = messages", "leave samples out"))
    if recipe.check.least_chars > recipe.check.most_chars:
        faults.append(("check.least_chars is more than check.most_chars", "correct one of them"))
    if recipe.check.regex:
        pattern(recipe.check.regex, "check.regex", ConfigError)
    return faults


def digest_of(recipe: Recipe) -> str:
    """Return a recipe's content as one line, for its hash."""
    return json.dumps(recipe.model_dump(), sort_keys=True, ensure_ascii=False)
