"""Kimi-K2: tool calls are numbered through the whole conversation.

The thinking releases (K2-Thinking, K2.5) drop earlier reasoning. K2-Thinking's template writes
`<think></think>` in every turn up to the last plain answer, so it drops a final answer's own reasoning.
The model writes `<think>…</think>` without line breaks, as the template does for the turns after that
answer.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks


def _call_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


THINKING = Release(
    name="Kimi-K2-Thinking",
    signature=("<|im_middle|>", "<think>"),
    source="moonshotai/Kimi-K2-Thinking: chat_template.jinja, docs/tool_call_guidance.md",
    think=ThinkMarks("<think>", "</think>"),
    call_id=_call_id,
    id_form="functions.NAME:i",
)
INSTRUCT = Release(
    name="Kimi-K2-Instruct",
    signature=("<|im_middle|>",),
    source="moonshotai/Kimi-K2-Instruct: chat_template.jinja, docs/tool_call_guidance.md",
    call_id=_call_id,
    id_form="functions.NAME:i",
)
