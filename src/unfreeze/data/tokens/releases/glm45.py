"""GLM-4.5, GLM-4.6: the template ends no turn. The model does, with the token that opens the next one.

This is `<|user|>` after an answer and `<|observation|>` after tool calls; both are end tokens in
generation_config.json.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="GLM-4.5",
    signature=("[gMASK]<sop>", "<|observation|>", "</think>"),
    source="zai-org/GLM-4.5: chat_template.jinja, generation_config.json",
    think=ThinkMarks("\n<think>", "</think>\n"),
    turn_end="<|user|>",
    call_end="<|observation|>",
)
