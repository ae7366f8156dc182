"""A model from nothing: config.json of a small Qwen3, and a tokenizer whose tokens are listed.

write(folder, ["0", "1", "+", "higher", …])    a text is cut into the longest of these; others are <unk>

The chat template writes turns one after another without marks. An assistant's turn ends with <eos>, and its
tool calls have the form of Hermes and Qwen. `unfreeze pretrain` begins such a folder from random weights.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = """
{%- for message in messages %}
  {{- message.content or "" }}
  {%- for call in message.tool_calls or [] %}
    {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}
    {{- '}</tool_call>' }}
  {%- endfor %}
  {%- if message.role == "assistant" %}<eos>{% endif %}
{%- endfor %}"""


def write(folder: Path, tokens: Sequence[str], *, width: int = 128, layers: int = 2, positions: int) -> None:
    """Write a folder for `unfreeze pretrain --model`. Heads have 32 numbers, positions are rotary."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokens) + 2,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer_of(tokens).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE}, indent=1)
    )


def tokenizer_of(tokens: Sequence[str]) -> Tokenizer:
    """Make a tokenizer; of two tokens that fit, the longer one is taken."""
    ids = {token: place for place, token in enumerate(["<eos>", "<unk>", *tokens])}
    longest_first = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    return tokenizer


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
