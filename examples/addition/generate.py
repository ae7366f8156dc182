"""Write the addition task: `python examples/addition/generate.py --out build/addition`.

  DIR/model/          config.json of a Qwen3 with 0.4 million weights, and a tokenizer of single characters
  DIR/sums.jsonl      texts to read first: "345+067=2140", with the digits of the sum reversed
  DIR/prompts.jsonl   prompts with their answers, for the reward
  DIR/held_out.jsonl  the same of other sums

Reversed, each digit of the sum needs only the digits to its left and a carry (Lee et al. 2023,
arXiv:2307.03381). The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "0123456789+="
TEXTS, PROMPTS, HELD_OUT = 10_000, 4_000, 200
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def main(out: Path, seed: int = 0) -> None:
    """Write all files."""
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1))
    tokenizer().save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10, 1000) for b in range(10, 1000)]
    sums = draw.sample(pairs, TEXTS + PROMPTS + HELD_OUT)
    write(out / "held_out.jsonl", [row(*pair) for pair in sums[:HELD_OUT]])
    write(out / "prompts.jsonl", [row(*pair) for pair in sums[HELD_OUT : HELD_OUT + PROMPTS]])
    texts = [row(*pair) for pair in sums[HELD_OUT + PROMPTS :]]
    write(out / "sums.jsonl", [{"text": each["prompt"] + each["answer"]} for each in texts])


def row(a: int, b: int) -> dict[str, str]:
    """ "345+067=" and "2140"."""
    return {"prompt": f"{a:03}+{b:03}=", "answer": f"{a + b:04}"[::-1]}


def tokenizer() -> Tokenizer:
    """A token for each character."""
    ids = {"<eos>": 0, **{character: place + 1 for place, character in enumerate(CHARACTERS)}}
    each = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    each.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    each.decoder = decoders.Fuse()
    each.add_special_tokens(["<eos>"])
    return each


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    main(parser.parse_args().out)
