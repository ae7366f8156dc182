"""Apriel-1.5, 1.6 Thinker: reasoning without tags.

The prompt starts the reasoning with a sentence, and a line in brackets ends it.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="Apriel-Thinker",
    signature=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    source="ServiceNow-AI/Apriel-1.5-15b-Thinker, Apriel-1.6-15b-Thinker: chat_template",
    think=ThinkMarks("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
)
