"""The gap between sampler and trainer with and without the sampler's experts replayed, on tiny-k2.

    python benchmarks/replay_gap.py

64 answers of 32 tokens per seed; |log p of the training pass - log p of the sampler| in nats over all sampled
tokens, and the share of choices that the training pass would have made otherwise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import unfreeze
from unfreeze.data import Example, pack
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.objectives.log_p import token_log_p
from unfreeze.rollout.routes import with_routes

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"
ROWS, TOKENS, TEMPERATURE = 64, 32, 1.0


def measure(dtype: str, seed: int) -> dict[str, dict[str, float]]:
    """Return mean and max of the gap, without and with replay."""
    speaker = unfreeze.load(str(TINY_K2), dtype=dtype)
    decoder = speaker.decoder
    lines = (TINY_K2 / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    prompts = [list(speaker.encode_chat(json.loads(line)["question"])) for line in lines]
    engine = Engine(decoder, tokenizer=speaker.tokenizer)  # without stop ids: every answer has 32 tokens
    sampling = Sampling(TOKENS, temperature=TEMPERATURE, seed=seed)
    done = engine.generate(prompts, sampling, experts=True)
    examples = [
        Example([*prompt, *answer.tokens], [0.0] * len(prompt) + [1.0] * TOKENS)
        for prompt, answer in zip(prompts, done, strict=True)
    ]
    sampled = torch.tensor([value for answer in done for value in answer.sampled_logprobs]).double()
    batch, result = pack(examples), {}
    for name, one in (
        ("own choice", batch),
        ("replayed", with_routes(batch, [answer.experts for answer in done])),
    ):
        for moe in decoder.moe_layers().values():
            moe.replayed_3.zero_()
        with torch.no_grad():
            hidden_TD = decoder.hidden(one)
        words = Words(engine.num_ids, TEMPERATURE)
        gap = (token_log_p(hidden_TD, decoder.lm_head, one, words=words) - sampled).abs()
        result[name] = {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": len(gap)}
        for layer, moe in decoder.moe_layers().items():
            known, flipped, _ = moe.replayed_3.tolist()
            if known:
                result[name][f"flipped in layer {layer}"] = flipped / known
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):
        for seed in range(arguments.seeds):
            for name, numbers in measure(dtype, seed).items():
                words = " ".join(f"{label} {value:.3g}" for label, value in numbers.items())
                print(f"{dtype} seed {seed} {name}: {words}", flush=True)


if __name__ == "__main__":
    main()
