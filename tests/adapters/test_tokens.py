"""Rows of new tokens that train alone, against peft's trainable_token_indices on a resized model."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, verify_adapter, without_adapters
from unfreeze.adapters.layouts import CONFIG, WEIGHTS
from unfreeze.adapters.readers import READERS
from unfreeze.adapters.several import Several
from unfreeze.adapters.tokens import token_rows, train_new_tokens
from unfreeze.compress.deltas import Deltas
from unfreeze.core.errors import AdapterError

LORA = LoraConfig(rank=4, alpha=8.0, targets=("attention",))
IDS, PARTS, SIZE = (60, 61, 62), ((5, 9), (11,), (7, 8, 41)), 63
DOCUMENTS = [[5, 17, 61, 58, 41, 2, 9], [11, 62], [60, 51, 60, 53, 54, 62, 56, 1]]
CASES = ("llama", "qwen2", "qwen3-moe")  # qwen2 is tied


def trained(tiny, case):
    model = tiny.model(case)
    train_new_tokens(model, IDS, PARTS, SIZE)
    attach(model, LORA, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("adapter.B", "adapter.rows")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def resized(tiny, case):
    """The transformers model with 63 rows, the new ones random: the adapter's file decides."""
    model = tiny.reference(case)
    model.resize_token_embeddings(SIZE, mean_resizing=False)
    return model


def loaded(tiny, case, directory, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(resized(tiny, case), directory, **options)


@pytest.mark.parametrize("case", CASES)
def test_first_rows_are_the_mean_of_the_parts_in_embeddings_and_head(tiny, case):
    model, base = tiny.model(case), tiny.model(case)
    train_new_tokens(model, IDS, PARTS, SIZE)
    for ours, before in ((model.model.embed_tokens, base.model.embed_tokens), (model.lm_head, base.lm_head)):
        wanted = torch.stack([before.weight[list(parts)].double().mean(0) for parts in PARTS])
        assert (ours.adapter.rows.double() - wanted).abs().max() < 1e-6
        assert (ours.weight[list(IDS)].double() - wanted).abs().max() < 1e-6
        assert torch.equal(ours.weight[:60], before.weight[:60])  # control
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (case == "qwen2")
    assert model.shape.vocab_size == SIZE and tiny.logits(model, DOCUMENTS).shape[1] == SIZE
    # a padded vocabulary does not grow
    padded = tiny.model(case)
    train_new_tokens(padded, (58, 59), PARTS[:2], 60)
    assert padded.shape.vocab_size == 61 and len(padded.model.embed_tokens.weight) == 61


@pytest.mark.parametrize("case", CASES)
def test_peft_on_a_resized_model_has_our_logits_gradients_and_steps(tiny, case, tmp_path):
    model = trained(tiny, case)
    save_adapter(model, tmp_path / "start")
    verify_adapter(model, tmp_path / "start")
    theirs = loaded(tiny, case, tmp_path / "start", is_trainable=True)
    ours, oracle = tiny.logits(model, DOCUMENTS), tiny.oracle_logits(theirs, DOCUMENTS)
    assert (ours - oracle).abs().max() < 1e-5 * max(1, oracle.abs().max())

    probe = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    for own, logits in ((model, tiny.logits), (theirs, tiny.oracle_logits)):
        parameters = [p for p in own.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (logits(own, DOCUMENTS) @ probe).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    save_adapter(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
    rows = [name for name in one if "trainable_tokens_delta" in name]
    start = load_file(tmp_path / "start" / WEIGHTS)
    assert len(rows) == (1 if case == "qwen2" else 2)
    assert all((one[name] != start[name]).any(1).all() for name in rows)  # control: every row moved

    again = tiny.model(case)  # what peft wrote, on a base that is not resized
    load_adapter(again, tmp_path / "peft")
    assert (tiny.logits(again, DOCUMENTS) - tiny.oracle_logits(theirs, DOCUMENTS)).abs().max() < 1e-4
    assert again.shape.vocab_size == SIZE


def test_other_rows_and_the_base_stay_as_they_were(tiny):
    model, base = trained(tiny, "qwen2"), tiny.model("qwen2")
    weight = base.model.embed_tokens.weight
    with without_adapters(model):
        old = [[token for token in document if token < 60] for document in DOCUMENTS]
        assert torch.equal(tiny.logits(model, old)[:, :60], tiny.logits(base, old)[:, :60])
    assert torch.equal(model.model.embed_tokens.weight[:60], weight[:60])
    assert model.lm_head.adapter is model.model.embed_tokens.adapter
    tiny.logits(model, DOCUMENTS).square().mean().backward()
    assert model.model.embed_tokens.weight.grad is None


def test_refused_by_name(tiny, tmp_path):
    model = trained(tiny, "llama")
    with pytest.raises(AdapterError, match="vllm holds no adapter of embeddings or new tokens"):
        save_adapter(model, tmp_path / "v", reader=READERS["vllm"])
    save_adapter(model, tmp_path / "a")
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        Several(tiny.model("llama")).load("one", tmp_path / "a")
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        Several(model, name="one")
    with pytest.raises(AdapterError, match="an adapter or trains fully already"):
        train_new_tokens(model, IDS, PARTS, SIZE)
    for more in ({"targets": ("lm_head",)}, {"train_too": ("embed_tokens",)}):
        fresh = tiny.model("llama")
        train_new_tokens(fresh, IDS, PARTS, SIZE)
        with pytest.raises(AdapterError, match="rows of new tokens train in"):
            attach(fresh, LoraConfig(**{"rank": 2, "targets": ("attention",), **more}), 0)
        other = tiny.model("llama")
        attach(other, LoraConfig(**{"rank": 2, "targets": ("attention",), **more}), 0)
        with pytest.raises(AdapterError, match="an adapter or trains fully already"):
            train_new_tokens(other, IDS, PARTS, SIZE)
    # a file with rows of the embeddings alone, which the head of this base doesn't have
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    leaf = "token_adapter.trainable_tokens_delta"
    table, head = (f"base_model.model.{name}.{leaf}" for name in ("model.embed_tokens", "lm_head"))
    others = {name: tensor for name, tensor in tensors.items() if leaf not in name}
    wrong = f"base_model.model.model.layers.0.embed_tokens.{leaf}"
    for rows, why in (
        ({}, "trainable_token_indices names tokens of .*, but the file has no rows"),
        ({head: tensors[head]}, "a row of the head alone for token 61"),
        ({table: tensors[table][:, :5].contiguous(), head: tensors[head]}, r"is \(3, 5\), but"),
        ({wrong: tensors[head]}, "is neither the embeddings nor the head"),
    ):
        save_file({**others, **rows}, tmp_path / "a" / WEIGHTS)
        with pytest.raises(AdapterError, match=why):
            load_adapter(tiny.model("llama"), tmp_path / "a")
    del tensors["base_model.model.lm_head.token_adapter.trainable_tokens_delta"]
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    with pytest.raises(AdapterError, match="a row of the embeddings alone for token 61"):
        load_adapter(tiny.model("llama"), tmp_path / "a")
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    config["trainable_token_indices"] = {"embed_tokens": [60, 61]}
    (tmp_path / "a" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=r"is \(3, 32\), but trainable_token_indices has 2 ids"):
        load_adapter(tiny.model("llama"), tmp_path / "a")


def test_a_list_of_ids_alone_is_of_the_embeddings(tiny, tmp_path):
    """peft's short form: old tokens' embeddings train, the head's rows stay."""
    theirs = peft.get_peft_model(
        tiny.reference("llama"),
        peft.LoraConfig(
            r=4, target_modules=["q_proj"], trainable_token_indices=[3, 41], task_type="CAUSAL_LM"
        ),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "trainable_tokens_delta" in name or "lora_B" in name:
                parameter.add_(0.1)
    theirs.save_pretrained(tmp_path)
    model = tiny.model("llama")
    load_adapter(model, tmp_path)
    assert {*token_rows(model)} == {"model.embed_tokens"} and model.shape.vocab_size == 61
    assert (tiny.logits(model) - tiny.oracle_logits(theirs.eval())).abs().max() < 1e-4


@pytest.mark.parametrize("ids", [{"lm_head": [1, 2], "embed_tokens": [3, 41]}, {"lm_head": [1, 2]}])
def test_rows_of_a_tied_head_alone_are_read_as_in_peft_and_not_merged(tiny, tmp_path, ids):
    theirs = peft.get_peft_model(
        tiny.reference("qwen2"),
        peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=ids, task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "trainable_tokens_delta" in name or "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    theirs.save_pretrained(tmp_path / "theirs")
    model, wanted = tiny.model("qwen2"), tiny.oracle_logits(theirs.eval())
    assert (tiny.logits(model) - wanted).abs().max() > 1e-2  # control
    load_adapter(model, tmp_path / "theirs")
    assert (tiny.logits(model) - wanted).abs().max() < 1e-4
    save_adapter(model, tmp_path / "ours")
    assert verify_adapter(model, tmp_path / "ours")
    again = tiny.model("qwen2")
    load_adapter(again, tmp_path / "ours")
    assert torch.equal(tiny.logits(again), tiny.logits(model))
    with pytest.raises(AdapterError, match="but rows of other tokens train in the head"):
        Deltas(tiny.model("qwen2"), tmp_path / "theirs")
