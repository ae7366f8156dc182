"""Facts about releases that a chat template does not contain but the model relies on.

They are think marks, the form of tool-call ids, and the end of a turn. One file per release. A release is
recognised by its chat template, which must contain every text of `signature`; the first match wins.
"""

from unfreeze.data.tokens.releases import (
    apriel,
    cohere,
    deepseek_r1,
    deepseek_v31,
    gemma4,
    glm45,
    gpt_oss,
    kimi_k2,
    minimax_m2,
    mistral,
    qwen3,
    seed_oss,
    smollm3,
)
from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASES: tuple[Release, ...] = (
    kimi_k2.THINKING,
    kimi_k2.INSTRUCT,
    deepseek_r1.RELEASE,
    deepseek_v31.RELEASE,
    deepseek_r1.FIRST,
    gpt_oss.RELEASE,
    glm45.RELEASE,
    minimax_m2.RELEASE,
    mistral.REASONING,
    mistral.RELEASE,
    apriel.RELEASE,
    cohere.RELEASE,
    gemma4.RELEASE,
    seed_oss.RELEASE,
    smollm3.RELEASE,
    qwen3.THINKING,
    qwen3.RELEASE,
)

UNKNOWN = Release(name="", signature=(), source="")

__all__ = ["RELEASES", "UNKNOWN", "Release", "ThinkMarks", "release_of"]


def release_of(template: str) -> Release:
    """Return the release that this chat template belongs to, or UNKNOWN."""
    return next(
        (release for release in RELEASES if all(text in template for text in release.signature)), UNKNOWN
    )
