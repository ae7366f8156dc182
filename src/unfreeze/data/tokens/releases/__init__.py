"""What a release's chat template leaves unsaid and its model says all the same.

Think marks, the form of tool-call ids, the end of a turn. One file per release. A release is recognised by
its chat template: every text of `signature` stands in it, and the first that fits wins.
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
    """The release whose chat template this is, or UNKNOWN."""
    return next(
        (release for release in RELEASES if all(text in template for text in release.signature)), UNKNOWN
    )
