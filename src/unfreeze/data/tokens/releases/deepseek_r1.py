"""DeepSeek-R1, R1-0528 and the R1-Distill models: the prompt opens the reasoning.

The history contains answers only. The prompt ends in `<think>⏎`; the model continues with its reasoning,
`⏎</think>⏎⏎` and the answer. An answer without reasoning closes the block at once, which is the form that
the model card recommends to force (`<think>⏎⏎</think>⏎⏎`). The first template, and that of R1-0528, leave
`<think>⏎` to the model.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")

RELEASE = Release(
    name="DeepSeek-R1",
    signature=("<｜Assistant｜><think>\\n",),
    source="deepseek-ai/DeepSeek-R1: tokenizer_config.json (chat_template), README.md, usage recommendations",
    think=_MARKS,
)
FIRST = Release(
    name="DeepSeek-R1",
    signature=("<｜Assistant｜>", "</think>"),
    source="deepseek-ai/DeepSeek-R1 (January 2025), DeepSeek-R1-0528: tokenizer_config.json (chat_template)",
    think=_MARKS,
)
