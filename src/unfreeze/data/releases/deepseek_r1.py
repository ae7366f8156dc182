"""DeepSeek-R1, R1-0528 and the R1-Distill models: the prompt opens the reasoning, and the history holds answers only.

The prompt ends in `<think>⏎`; the model goes on with its reasoning, `⏎</think>⏎⏎` and the answer. An answer without reasoning closes the
block at once, the form that the model card recommends to force (`<think>⏎⏎</think>⏎⏎`).
"""

from unfreeze.data.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="DeepSeek-R1",
    signature=("<｜Assistant｜><think>\\n",),
    source="deepseek-ai/DeepSeek-R1: tokenizer_config.json (chat_template), README.md, usage recommendations",
    think=ThinkMarks("<think>\n", "\n</think>\n\n"),
)
