"""Gemma 4: reasoning is the channel `thought`.

In the larger models, the prompt contains an empty one if thinking is off.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="Gemma-4",
    signature=("<|turn>", "<|channel>thought"),
    source="google/gemma-4-31B-it: chat_template.jinja",
    think=ThinkMarks("<|channel>thought\n", "\n<channel|>"),
)
