"""Fields of a judge's file: a model behind a server whose opinion of an answer is its reward.

# judge.toml
endpoint = "http://127.0.0.1:8000/v1"
rubric = "10: right, and short. 0: wrong."
"""

# A Config is frozen, so its fields may have other defaults; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from unfreeze.config.endpoint import Asked
from unfreeze.config.parse import Folder, from_file
from unfreeze.core.errors import ConfigError, looked_in, nearest

SUFFIX = ".toml"
EXAMPLE = 'endpoint = "http://127.0.0.1:8000/v1" and rubric = "10: right, and short. 0: wrong."'
PATIENCE = ("endpoint", "timeout", "at_once", "price_read", "price_written", "budget_usd", "rubric_file")
"""Fields that may change within a run: they don't decide a verdict. (A rubric's text does.)"""


class JudgeConfig(Asked):
    """A judge. Its key comes from the environment variable OPENAI_API_KEY."""

    endpoint: str = Field(description="address of an OpenAI-compatible server")
    model: str = Field(default="", description="the model's name on the server; empty: the server's default")
    rubric: str = Field(default="", description="what makes an answer good, in words for the judge")
    rubric_file: Folder = Field(default="", description="file with the rubric, beside this one")
    mode: Literal["score", "pairs"] = Field(
        default="score",
        description="score: 0 to 10 for each answer. pairs: answers of a group are compared, twice each",
    )
    pairs: int = Field(default=4, ge=2, description="most comparisons of an answer, in the mode pairs")
    reference: str = Field(
        default="",
        description="column with an answer that the judge sees; empty: the column answer, in rows that"
        " have it",
    )
    max_tokens: int = Field(default=512, ge=8, description="most tokens of a verdict")
    temperature: float = Field(default=0.0, ge=0, description="of the judge's sampling")
    timeout: float = Field(default=60.0, gt=0, description="seconds to wait for a complete verdict")
    at_once: int = Field(default=8, ge=1, le=256, description="requests at the same time")

    @property
    def digest(self) -> str:
        """Hash of what decides the verdicts: a resumed run is refused if it differs."""
        fields = self.model_dump(exclude=set(PATIENCE))
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def is_judge(reward: object) -> bool:
    """True if a run's reward is a judge's file."""
    return isinstance(reward, str) and reward.endswith(SUFFIX)


def read_judge(written: str) -> JudgeConfig:
    """Read a judge's file, with the rubric's text in `rubric`.

    Raises ConfigError if it is missing or has a wrong field, and without exactly one rubric.
    """
    path = Path(written)
    if not path.is_file():
        others = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"reward = {written!r}: there is no file {written}{looked_in(written)}"
            f"{nearest(path.name, others)}",
            next=f"a file with {EXAMPLE}",
        )
    judge = from_file(JudgeConfig, path, f"{EXAMPLE} in {path.name}")
    if bool(judge.rubric) == bool(judge.rubric_file):
        count = "two" if judge.rubric else "none"
        raise ConfigError(
            f"{path} needs one rubric and has {count}", next="give rubric, its text, or rubric_file beside it"
        )
    rubric = judge.rubric
    if judge.rubric_file:
        beside = path.parent / judge.rubric_file
        try:
            rubric = beside.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: rubric_file = {judge.rubric_file!r} cannot be read: {error}",
                next="give a text file beside it",
            ) from None
    if not rubric.strip():
        raise ConfigError(f"{path}: the rubric is empty", next='rubric = "10: right, and short. 0: wrong."')
    return judge.model_copy(update={"rubric": rubric.strip()})
