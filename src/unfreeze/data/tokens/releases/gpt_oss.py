"""gpt-oss: the harmony format.

Reasoning is the analysis channel, which the template reads from a message's `thinking`.
A turn ends with `<|return|>`, a tool call with `<|call|>`; both stop generation (generation_config.json). The
template writes both.
"""

from unfreeze.data.tokens.releases.release import Release

RELEASE = Release(
    name="gpt-oss",
    signature=("<|channel|>analysis", "<|start|>assistant"),
    source="openai/gpt-oss-20b: chat_template.jinja, generation_config.json",
)
