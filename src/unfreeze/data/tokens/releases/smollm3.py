"""SmolLM3: the template writes a turn's content and ignores reasoning.

In its non-thinking mode it writes an empty block before the answer, `<think>⏎⏎</think>⏎`; the model writes a
full one in the same form. The mode is set by `enable_thinking`, or by "/think" and "/no_think" in the system
message.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="SmolLM3",
    signature=("<|im_start|>", "/no_think", "Reasoning Mode"),
    source="HuggingFaceTB/SmolLM3-3B: chat_template.jinja",
    think=ThinkMarks("<think>\n", "\n</think>\n"),
)
