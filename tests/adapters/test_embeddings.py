"""LoRA on the embeddings and the output head, against peft."""

import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, verify_adapter, without_adapters
from unfreeze.adapters.embeddings import EmbeddingLowRank, embedding_adapter, put_embeddings
from unfreeze.adapters.layouts import WEIGHTS
from unfreeze.adapters.readers import READERS
from unfreeze.adapters.several import Several
from unfreeze.config.adapter import lora_of
from unfreeze.core.errors import AdapterError

LORA = LoraConfig(rank=4, alpha=8.0, targets=("attention", "embed_tokens", "lm_head"))
CASES = ("llama", "qwen2", "qwen3-moe")  # qwen2 is tied


def trained(tiny, case):
    model = tiny.trained(tiny.model(case), LORA)
    with torch.no_grad():
        for adapter in embedding_adapter(model).values():
            adapter.A.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    return model


def loaded(tiny, case, directory, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(tiny.reference(case), directory, **options)


@pytest.mark.parametrize("case", CASES)
def test_peft_has_our_logits_and_steps_and_what_it_writes_is_read(tiny, case, tmp_path):
    model = trained(tiny, case)
    save_adapter(model, tmp_path / "start")
    verify_adapter(model, tmp_path / "start")
    theirs = loaded(tiny, case, tmp_path / "start", is_trainable=True)
    ours, oracle = tiny.logits(model), tiny.oracle_logits(theirs)
    assert (ours - oracle).abs().max() < 1e-5 * max(1, oracle.abs().max())
    probe = torch.randn(61, generator=torch.Generator().manual_seed(1))
    for own, logits in ((model, tiny.logits), (theirs, tiny.oracle_logits)):
        parameters = [p for p in own.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (logits(own) @ probe).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    save_adapter(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "peft")
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    base = {name for name in other if name.endswith("base_layer.weight")}  # peft saves the tables too
    assert len(base) == 2 and one.keys() == other.keys() - base
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
    start = load_file(tmp_path / "start" / WEIGHTS)
    assert all(not torch.equal(one[name], start[name]) for name in one)  # control

    again = tiny.model(case)
    load_adapter(again, tmp_path / "peft")
    assert (tiny.logits(again) - tiny.oracle_logits(theirs)).abs().max() < 1e-4
    assert {"embed_tokens", "*.lm_head"} <= {
        t.replace("*.*.", "*.") for t in lora_of(tmp_path / "peft")["targets"]
    }
    # tables of another base are refused
    for change in (lambda weight: weight + 1, lambda weight: weight[:-1].contiguous()):
        save_file({**other, min(base): change(other[min(base)])}, tmp_path / "peft" / WEIGHTS)
        with pytest.raises(AdapterError, match="another than the base's"):
            load_adapter(tiny.model(case), tmp_path / "peft")


def test_a_new_adapter_changes_nothing_and_is_drawn_as_in_peft(tiny):
    model, base = tiny.model("llama"), tiny.logits(tiny.model("llama"))
    attach(model, LORA, 0)
    assert torch.equal(tiny.logits(model), base)
    adapter = model.model.embed_tokens.adapter
    assert not adapter.A.any() and abs(float(adapter.B.std()) - 1) < 0.2
    other = tiny.model("llama")
    attach(other, LORA, 1)
    assert not torch.equal(other.model.embed_tokens.adapter.B, adapter.B)  # the seed's
    own = EmbeddingLowRank(adapter.A.detach().clone() + 1, adapter.B.detach().clone(), adapter.scale)
    put_embeddings(other, own)  # into those that are there
    assert other.model.embed_tokens.adapter is not own
    assert torch.equal(other.model.embed_tokens.adapter.A, own.A)
    own.scale *= 2
    with pytest.raises(AdapterError, match="another rank or scale"):
        put_embeddings(other, own)
    moved = trained(tiny, "llama")
    with without_adapters(moved):
        assert torch.equal(tiny.logits(moved), base)
    assert not torch.equal(tiny.logits(moved), base)  # control


def test_refused_by_name(tiny, tmp_path):
    with pytest.raises(AdapterError, match="names the embeddings alone"):
        attach(tiny.model("llama"), LoraConfig(rank=2, targets=("embed_tokens",)), 0)
    model = trained(tiny, "llama")
    with pytest.raises(AdapterError, match="vllm holds no adapter of embeddings"):
        save_adapter(model, tmp_path / "v", reader=READERS["vllm"])
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        Several(model, name="one")
    save_adapter(model, tmp_path / "a")
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        Several(tiny.model("llama")).load("one", tmp_path / "a")
    with pytest.raises(AdapterError, match="the adapter of the embeddings has"):
        tensors = load_file(tmp_path / "a" / WEIGHTS)
        name = "base_model.model.model.embed_tokens.lora_embedding_A"
        save_file({**tensors, name: tensors[name][:, :5].contiguous()}, tmp_path / "a" / WEIGHTS)
        load_adapter(tiny.model("llama"), tmp_path / "a")


def test_the_plan_counts_them(tiny):
    from unfreeze.models.targets import per_rank

    model = tiny.model("llama")
    dense, _ = per_rank(LORA, model)
    attach(model, LORA, 0)
    assert dense * 4 == sum(p.numel() for p in model.parameters() if p.requires_grad)
