"""MiniMax-M2, M2.5: the prompt opens the reasoning.

The template writes no block for an answer without reasoning.
"""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="MiniMax-M2",
    signature=("]~b]ai", "<think>"),
    source="MiniMaxAI/MiniMax-M2: chat_template.jinja",
    think=ThinkMarks("<think>\n", "\n</think>\n\n"),
)
