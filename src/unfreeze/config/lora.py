"""Fields of LoRA adapters."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unfreeze.core.field import about

Scaling = Literal["alpha/r", "alpha/sqrt(r)"]
MergeFormat = Literal["", "same", "int4", "fp8", "mxfp4", "nvfp4", "nf4"]
MergeScales = Literal["refit", "keep", "keep-change"]
Start = Literal["lora", "pissa", "pissa_niter_4", "pissa_niter_16"]
"""First values of A and B; peft's names in init_lora_weights, but for "lora"."""


def separated(value: Any) -> Any:
    """Split at commas: "norm,*.gate" is two names."""
    words: Any = [value] if isinstance(value, str) else value or ()
    if not isinstance(words, (list, tuple)):
        return value
    if not all(isinstance(word, str) for word in cast(list[Any], words)):
        return value
    return tuple(part.strip() for word in cast(list[str], words) for part in word.split(",") if part.strip())


Names = Annotated[tuple[str, ...], BeforeValidator(separated)]
"""Names of modules or groups, with commas or spaces between them."""


def scale_of(rank: int, alpha: float, scaling: Scaling) -> float:
    """alpha / r, or alpha / sqrt(r) if rank-stabilised.

    With sqrt(r) the update keeps its size as r grows (Kalajdzievski 2023).
    """
    return alpha / rank if scaling == "alpha/r" else alpha / math.sqrt(rank)


class LoraConfig(BaseModel):
    """Low-rank adapters: ΔW = scale · B A beside each target, the base frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # alpha = 2 x rank, and adapters on all linear layers: Biderman et al. 2024, arXiv:2405.09673
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16,
        description="rank r of A and B (1 to 4096). A higher rank can learn more and takes more memory",
        json_schema_extra=about("Adapters", alias="rank", first=True),
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0,
        description="scale of the update is alpha / rank; twice the rank is usual",
        json_schema_extra=about("Adapters", was="alpha"),
    )
    targets: Names = Field(
        default=("all-linear",),
        min_length=1,
        description=(
            "all-linear (linear layers and routed experts, not lm_head, embeddings, router, indexer),"
            " experts, attention, mlp, shared_experts, indexer, or module names and globs such as *.q_proj;"
            " spaces or commas between them"
        ),
        json_schema_extra=about("Adapters", was="targets"),
    )
    experts_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None,
        description="rank of the routed experts' adapters; unset: same as `rank`",
        json_schema_extra=about("Adapters", was="experts_rank"),
    )
    scaling: Scaling = Field(
        default="alpha/r",
        description="alpha/r (LoRA), or alpha/sqrt(r) (rank-stabilised, for ranks above about 64)",
        json_schema_extra=about("Adapters", was="scaling"),
    )
    merge_aware: MergeFormat = Field(
        default="",
        description=(
            "train through the rounding of a merge into this format: int4, fp8, mxfp4, nvfp4, nf4, or same:"
            " each weight's own; unset: ordinary LoRA"
        ),
        json_schema_extra=about("Adapters", alias="merge_aware", since="0.2"),
    )
    merge_aware_from: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of the steps after which merge_aware begins; before it, ordinary LoRA",
        json_schema_extra=about("Adapters", alias="merge_aware_from", since="0.2"),
    )
    merge_aware_scales: MergeScales | None = Field(
        default=None,
        description=(
            "scales of merge_aware, as in merge --scales: refit, keep, keep-change; unset: keep-change where"
            " the base's format has it, else refit"
        ),
        json_schema_extra=about("Adapters", alias="merge_aware_scales", since="0.2"),
    )
    dora: bool = Field(
        default=False,
        description=(
            "DoRA: also train the length of each row of W + ΔW (linear layers; peft has none for experts)"
        ),
        json_schema_extra=about("Adapters", since="0.2"),
    )
    start: Start = Field(
        default="lora",
        description=(
            "lora: A random, B zero. pissa: A and B from the largest singular values of W, by a full SVD or"
            " (niter) a fast one; saved as LoRA of twice the rank"
        ),
        json_schema_extra=about("Adapters", since="0.2"),
    )
    train_too: Names = Field(
        default=(),
        description=(
            "modules that train fully in float32 beside the adapters, such as norm, *.gate, lm_head"
            " (names, or globs; commas separate them)"
        ),
        json_schema_extra=about("Adapters", alias="train_too", since="0.3"),
    )
    new_tokens: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
        default="",
        description=(
            "file of tokens to add, one per line (or a JSON list): rows of embeddings and head, from the mean"
            " of each token's parts, train beside the adapters"
        ),
        json_schema_extra=about("Adapters", alias="new_tokens", since="0.3"),
    )

    @model_validator(mode="after")
    def _one_kind(self) -> LoraConfig:
        """Merge-aware training computes with W + ΔW of ordinary factors; its settings need it."""
        idle = {"from": self.merge_aware_from > 0, "scales": self.merge_aware_scales is not None}
        if not self.merge_aware and any(idle.values()):
            field = "merge_aware_" + next(name for name, is_set in idle.items() if is_set)
            raise ValueError(f"{field} has no effect without merge_aware: give it too, such as int4")
        if self.merge_aware and self.reads_weights:
            other = "dora" if self.dora else f"start = {self.start}"
            raise ValueError(
                f"merge_aware rounds ordinary factors, not lora.{other}: leave one of the two out"
            )
        return self

    @property
    def reads_weights(self) -> bool:
        """True if the adapters' first values come from the weights."""
        return self.dora or self.start != "lora"

    def rank_of(self, group: str) -> int:
        """Return experts_rank for routed experts if it is set, else rank."""
        return self.experts_rank if group == "experts" and self.experts_rank is not None else self.rank

    def scale_of(self, group: str) -> float:
        """Scale of a group's updates, by `scaling`."""
        return scale_of(self.rank_of(group), self.alpha, self.scaling)
