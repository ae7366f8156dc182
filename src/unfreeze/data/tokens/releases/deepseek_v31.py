"""DeepSeek-V3.1: one model with and without reasoning, as the prompt says.

It ends in `<think>` or in `</think>`. No line breaks stand around the marks. Without the template's variable
`thinking` the prompt ends in `</think>`; `--data.template-variables thinking=true` teaches the thinking mode,
with `<think>` in the prompt.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="DeepSeek-V3.1",
    signature=("<｜Assistant｜>", "</think>", "thinking"),
    source="deepseek-ai/DeepSeek-V3.1: README.md (chat template), assets/chat_template.jinja",
    think=ThinkMarks("<think>", "</think>"),
)
