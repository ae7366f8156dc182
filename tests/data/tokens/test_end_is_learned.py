"""docs/why/trust.md N6 end to end: pad = eos, and a trained model still ends its answers. The control arm masks
targets by the pad id, and never ends one."""

from dataclasses import replace

import pytest
import torch

from unfreeze import models
from unfreeze.data import Batches, Conversation, Encoder, encode_chat, load_tokenizer
from unfreeze.generate.model import Model
from unfreeze.generate.sampling import Sampling
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
WORDS = ("Paris", "Hamlet", "France", "play", "capital", "answer", "helpful", "system")
CONVERSATIONS = [
    [{"role": "user", "content": f"{first} {second}"}, {"role": "assistant", "content": f"{second}, it is."}]
    for first in WORDS
    for second in WORDS
]


@pytest.fixture(scope="module")
def tokenizer(json_folder, templates):
    # the end of a turn is the eos token, and so is pad
    return load_tokenizer(json_folder(templates["deepseek"], pad_token="<|eos|>"))


def ended(tokenizer, *, mask_pad: bool) -> float:
    """The share of all prompts whose answer the trained model ends by itself."""
    torch.manual_seed(0)
    model = models.build(
        models.shape({**CONFIG, "vocab_size": tokenizer.named_size}), dtype=torch.float32, device="cpu"
    )
    models.initialize(model, seed=0)
    encode = Encoder(tokenizer, 64)
    batches = Batches(
        [example for messages in CONVERSATIONS for example in encode(Conversation(messages)).examples],
        256,
        seed=0,
    )
    optimizer = AdamW(model)
    for _, ((batch,), _) in zip(range(60), batches, strict=False):
        if mask_pad:
            batch = replace(
                batch, weights_T=batch.weights_T * (batch.targets_T != tokenizer.token_id("<|eos|>"))
            )
        train_step(
            model, optimizer, [batch], cross_entropy, learning_rate=5e-3, max_norm=1.0, recompute=models.plain
        )
    prompts = [encode_chat(tokenizer, messages[:1]) for messages in CONVERSATIONS]
    done = Model(model, tokenizer).engine.generate(prompts, Sampling(max_new_tokens=24))
    return sum(completion.finish_reason == "stop" for completion in done) / len(done)


def test_a_trained_model_ends_its_answers_although_pad_is_eos(tokenizer):
    assert ended(tokenizer, mask_pad=False) >= 0.99


def test_control_arm_masking_the_pad_id_loses_the_end(tokenizer):
    assert ended(tokenizer, mask_pad=True) < 0.5
