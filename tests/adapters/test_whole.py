"""Modules that train fully beside adapters, against peft's modules_to_save."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import (
    LoraConfig,
    attach,
    load_adapter,
    save_adapter,
    verify_adapter,
    with_adapters,
    without_adapters,
)
from unfreeze.adapters.attach import attached
from unfreeze.adapters.layouts import CONFIG, WEIGHTS
from unfreeze.adapters.readers import READERS
from unfreeze.adapters.several import Several
from unfreeze.adapters.whole import WholeWeights, put_on, take_off, wholes
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.linear import Linear
from unfreeze.quant.int4 import Int4

LORA = {"rank": 4, "alpha": 8.0, "targets": ("attention",)}
TOO = {
    "llama": ("norm", "lm_head"),
    "qwen2": ("embed_tokens", "*_layernorm"),  # tied
    "qwen3-moe": ("*.gate", "norm", "embed_tokens"),
    "deepseek": ("*.gate", "*norm"),  # routers with a bias that does not train
}


def moved(tiny, case, seed=0, **more):
    """A model with random factors and trained modules, as training would leave them."""
    model = tiny.trained(tiny.model(case), LoraConfig(**LORA, train_too=TOO[case], **more))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for own in wholes(model).values():
            for parameter in own.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def loaded(tiny, case, directory, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(tiny.reference(case), directory, **options)


@pytest.mark.parametrize("case", TOO)
def test_peft_reads_them_with_our_logits_and_gradients(tiny, case, tmp_path):
    model = moved(tiny, case)
    save_adapter(model, tmp_path)
    verify_adapter(model, tmp_path)
    theirs = loaded(tiny, case, tmp_path, is_trainable=True)
    probe = torch.randn(61, generator=torch.Generator().manual_seed(1))
    ours, oracle = tiny.logits(model), tiny.oracle_logits(theirs)
    assert (ours - oracle).abs().max() < 1e-5 * max(1, oracle.abs().max())
    (ours @ probe).mean().backward()
    (oracle @ probe).mean().backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    for name, own in wholes(model).items():
        for leaf, parameter in own.named_parameters():
            expected = gradients.get(f"{name}.{leaf}")
            if expected is None and name == "lm_head":  # tied: peft counts it under the embeddings
                expected = gradients["model.embed_tokens.weight"]
            assert (parameter.grad - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    # control arm: without them the logits are others
    plain = tiny.model(case)
    assert (tiny.logits(plain) - oracle).abs().max() > 1e-2


@pytest.mark.parametrize("case", TOO)
def test_steps_in_ours_and_in_peft_end_at_the_same_weights(tiny, case, tmp_path):
    """From one start, three steps of plain gradient descent in each; peft's folder then loads here."""
    model = moved(tiny, case)
    save_adapter(model, tmp_path / "start")
    theirs = loaded(tiny, case, tmp_path / "start", is_trainable=True)
    probe = torch.randn(61, generator=torch.Generator().manual_seed(1))
    for trained, logits in ((model, tiny.logits), (theirs, tiny.oracle_logits)):
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (logits(trained) @ probe).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    save_adapter(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "peft")
    ours, peft_file = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    whole = [name for name in ours if ".lora_" not in name]
    assert whole and ours.keys() == peft_file.keys()
    for name in ours:
        assert (ours[name].float() - peft_file[name].float()).abs().max() < 1e-5, name
    start = load_file(tmp_path / "start" / WEIGHTS)
    still = [name for name in whole if torch.equal(ours[name], start[name])]
    assert all("e_score_correction_bias" in name for name in still)  # control: all else moved

    again = tiny.model(case)
    load_adapter(again, tmp_path / "peft")
    assert (tiny.logits(again) - tiny.oracle_logits(theirs)).abs().max() < 1e-4


def test_without_adapters_the_model_is_the_base_and_afterwards_it_is_as_before(tiny):
    model, base = moved(tiny, "qwen2"), tiny.logits(tiny.model("qwen2"))
    before = tiny.logits(model)
    assert not torch.equal(before, base)  # control
    with without_adapters(model):
        assert torch.equal(tiny.logits(model), base)
    assert torch.equal(tiny.logits(model), before)
    other = attached(moved(tiny, "qwen2", seed=1))
    with with_adapters(model, other):
        assert not torch.equal(tiny.logits(model), before)
    assert torch.equal(tiny.logits(model), before)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied all the time


def test_a_tied_head_and_the_embeddings_are_one_also_when_read(tiny, tmp_path):
    model = moved(tiny, "qwen2")
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["ensure_weight_tying"] and {"embed_tokens", "lm_head"} <= {*config["modules_to_save"]}
    again = tiny.model("qwen2")
    load_adapter(again, tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    # control arm: a file of two different ones is read as two
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, tmp_path / WEIGHTS)
    again = tiny.model("qwen2")
    load_adapter(again, tmp_path)
    assert again.lm_head.weight is not again.model.embed_tokens.weight


def test_names_for_peft_mean_these_modules_alone(tiny, tmp_path):
    """peft compares ends of names: "norm" would train every layernorm too."""
    model = tiny.model("qwen3-moe")
    attach(model, LoraConfig(**LORA, train_too=("norm", "model.layers.1.mlp.gate")), 0)
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["modules_to_save"] == [
        "model.layers.1.mlp.gate",
        "model.norm",
    ]
    theirs = loaded(tiny, "qwen3-moe", tmp_path, is_trainable=True)
    names = {n for n, p in theirs.named_parameters() if p.requires_grad and "modules_to_save" in n}
    assert len(names) == 2
    (tmp_path / CONFIG).write_text((tmp_path / CONFIG).read_text().replace('"model.norm"', '"norm"'))
    with pytest.raises(KeyError, match="q_norm"):  # control arm
        peft.PeftModel.from_pretrained(tiny.reference("qwen3-moe"), tmp_path, is_trainable=True)


@pytest.mark.parametrize(
    ("too", "targets", "why"),
    [
        (("*.gat",), ("attention",), r"'\*\.gat' matches none of \d+ modules.*\*\.gate"),
        (("nrom",), ("attention",), "'nrom' matches none.*norm"),
        (("*.experts",), ("attention",), "stacked experts"),
        (("self_attn",), ("attention",), "without weights of their own"),
        (("*.q_proj",), ("attention",), "named by lora.targets and by lora.train_too"),
    ],
)
def test_what_cannot_train_fully_is_refused_by_name(tiny, too, targets, why):
    model = tiny.model("qwen3-moe")
    with pytest.raises(AdapterError, match=why) as error:
        attach(model, LoraConfig(rank=2, targets=targets, train_too=too), 0)
    assert len(str(error.value).splitlines()) == 2
    attach(model, LoraConfig(rank=2, targets=targets, train_too=("*.gate",)), 0)  # control


def test_a_packed_module_is_refused_by_name(tiny):
    shape = tiny.model("llama").shape

    def codec_for(name):
        return Int4(32) if name.endswith("v_proj") else None

    model = models.build(shape, dtype=torch.float32, codec_for=codec_for)
    with pytest.raises(AdapterError, match=r"2 of the modules are packed.*first: model\.layers\.0"):
        attach(model, LoraConfig(rank=2, targets=("*.q_proj",), train_too=("*.v_proj",)), 0)
    attach(model, LoraConfig(rank=2, targets=("*.q_proj",), train_too=("*.k_proj",)), 0)  # control


def test_readers_of_lora_alone_and_several_adapters_are_refused_by_name(tiny, tmp_path):
    model = moved(tiny, "llama")
    with pytest.raises(AdapterError, match="vllm holds LoRA alone, but 2 modules trained fully"):
        save_adapter(model, tmp_path / "vllm", reader=READERS["vllm"])
    save_adapter(model, tmp_path / "peft")
    several = Several(tiny.model("llama"))
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        several.load("one", tmp_path / "peft")
    with pytest.raises(AdapterError, match="several adapters at once are LoRA alone"):
        Several(model, name="one")
    # control arm: the same adapter without them
    plain = tiny.trained(tiny.model("llama"), LoraConfig(**LORA))
    save_adapter(plain, tmp_path / "vllm", reader=READERS["vllm"])
    several.load("one", tmp_path / "vllm")


def test_a_file_with_a_wrong_or_missing_weight_is_refused_and_the_model_stays(tiny, tmp_path):
    save_adapter(moved(tiny, "deepseek"), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    norm = "base_model.model.model.norm.weight"
    bias = "base_model.model.model.layers.1.mlp.gate.e_score_correction_bias"
    changes = {
        "no weight of a module": {"base_model.model.model.nrom.weight": tensors[norm].clone()},
        r"is \(3,\), but the model has \(32,\)": {norm: torch.ones(3)},
        "differs from the base's": {bias: tensors[bias] + 1},
    }
    for why, change in changes.items():
        save_file({**tensors, **change}, tmp_path / WEIGHTS)
        model = tiny.model("deepseek")
        with pytest.raises(AdapterError, match=why):
            load_adapter(model, tmp_path)
        assert not attached(model)
    lacking = {name: tensor for name, tensor in tensors.items() if not name.endswith("mlp.gate.weight")}
    save_file(lacking, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="gate has no weight in the file"):
        load_adapter(tiny.model("deepseek"), tmp_path)
    save_file(tensors, tmp_path / WEIGHTS)
    load_adapter(tiny.model("deepseek"), tmp_path)  # control
    model = tiny.model("qwen2")
    attach(model, LoraConfig(rank=2, targets=("*.o_proj",), train_too=("*.q_proj",)), 0)
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj\.bias is missing"):
        load_adapter(tiny.model("qwen2"), tmp_path)


def test_verify_finds_a_weight_that_differs(tiny, tmp_path):
    model = moved(tiny, "llama")
    save_adapter(model, tmp_path)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    with pytest.raises(AdapterError, match=r"model\.norm\.weight differs"):
        verify_adapter(model, tmp_path)


def test_a_module_that_widens_its_weight_trains_one_that_needs_it_not_and_gets_the_base_back():
    module = Linear(4, 3, dtype=torch.float32, held=torch.bfloat16, device="cpu")
    base = module.weight
    for _ in range(2):  # the second in place of the first
        put_on(module, WholeWeights({"weight": torch.nn.Parameter(torch.ones(3, 4))}))
        assert module.widened is None and module.weight.dtype == torch.float32
    take_off(module)
    assert module.weight is base and module.widened == torch.float32


def test_norms_and_routers_train_in_float32_and_a_head_in_half_precision_has_a_master(tiny, tmp_path):
    from unfreeze.train.optim import AdamW

    model = tiny.model("qwen3-moe").to(torch.bfloat16)
    model.dtype = torch.bfloat16
    attach(model, LoraConfig(**LORA, train_too=("*norm", "*.gate", "lm_head")), 0)
    assert model.model.norm.weight.dtype == model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    save_adapter(model, tmp_path)  # a file has float32
    again = tiny.model("qwen3-moe").to(torch.bfloat16)
    again.dtype = torch.bfloat16
    load_adapter(again, tmp_path)
    assert {n: p.dtype for n, p in again.named_parameters()} == {
        n: p.dtype for n, p in model.named_parameters()
    }
    optimizer = AdamW(model, weight_decay=0.1)
    assert all(master.dtype == torch.float32 for master in optimizer.masters.values())
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    tiny.logits(model).square().mean().backward()
    optimizer.collect()
    optimizer.update(1e-4, 1.0)
    moved_ = {name for name, master in optimizer.masters.items() if not torch.equal(master, before[name])}
    assert {"model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= moved_


def test_the_plan_counts_what_really_trains(tiny):
    from unfreeze.parallel.plan.sizes import measure_sizes

    model = tiny.model("qwen2")
    config = LoraConfig(**LORA, train_too=TOO["qwen2"])
    sizes = measure_sizes(model, config)
    attach(model, config, 0)
    assert sizes.adapter_parameters(4, None) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    plain = measure_sizes(tiny.model("qwen2"), LoraConfig(**LORA))
    assert plain.adapter_parameters(4, None) < sizes.adapter_parameters(4, None)  # control
