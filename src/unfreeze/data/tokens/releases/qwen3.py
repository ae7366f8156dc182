"""Qwen3, QwQ, Qwen3-Thinking: `<think>⏎…⏎</think>⏎⏎` before the answer; earlier turns lose theirs.

Qwen3's template writes the last turn's block itself. QwQ and some conversions open it in the prompt and drop
it from the history.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")

THINKING = Release(
    name="QwQ",
    signature=("<|im_start|>assistant\\n<think>\\n",),
    source="Qwen/QwQ-32B, Qwen/Qwen3-30B-A3B-Thinking-2507: chat_template",
    think=_MARKS,
)
RELEASE = Release(
    name="Qwen3",
    signature=("<|im_start|>", "reasoning_content", "</think>"),
    source="Qwen/Qwen3-8B: tokenizer_config.json (chat_template)",
    think=_MARKS,
)
