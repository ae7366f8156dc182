"""Command R7B, Command A: `<|START_THINKING|>` … `<|END_THINKING|>` before the answer or the actions."""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="Command-R7B",
    signature=("<|CHATBOT_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    source=(
        "CohereForAI/c4ai-command-r7b-12-2024, CohereLabs/c4ai-command-a-03-2025: tokenizer_config.json"
        " (chat_template)"
    ),
    think=ThinkMarks("<|START_THINKING|>", "<|END_THINKING|>"),
)
