"""DeepSeek-V3.1: one model with and without reasoning, selected by the prompt.

The prompt ends in `<think>` or in `</think>`, without line breaks around the marks. Without the template
variable `thinking` it ends in `</think>`. `--data.template-variables thinking=true` trains the thinking mode,
with `<think>` in the prompt.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="DeepSeek-V3.1",
    signature=("<｜Assistant｜>", "</think>", "thinking"),
    source="deepseek-ai/DeepSeek-V3.1: README.md (chat template), assets/chat_template.jinja",
    think=ThinkMarks("<think>", "</think>"),
)
