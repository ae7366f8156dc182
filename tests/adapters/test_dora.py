"""DoRA against peft's own: the same outputs, gradients and steps, on dense and packed weights, both ways through
the files. And the norm in bf16 against float64."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, sites, verify_adapter
from unfreeze.adapters import dora as dora_file
from unfreeze.adapters.dora import Dora, row_norms
from unfreeze.adapters.output_change import _only, _Part, _Variant
from unfreeze.adapters.several import Several
from unfreeze.adapters.snapshot import Snapshot
from unfreeze.config.adapter import CONFIG, WEIGHTS, lora_of
from unfreeze.core.errors import AdapterError
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.saved import Saved
from unfreeze.quant.int4 import Int4
from unfreeze.train.optim import AdamW

CONFIGURED = LoraConfig(rank=4, alpha=8.0, dora=True)
NAMES = {
    "A": "lora_A.default.weight",
    "B": "lora_B.default.weight",
    "m": "lora_magnitude_vector.default.weight",
}
PROBE = torch.randn(61, generator=torch.Generator().manual_seed(1))


def moved(model):
    """Random B and m, as after training."""
    with torch.no_grad():
        for index, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(index)
            adapter = site.adapter
            adapter.B.copy_(0.1 * torch.randn(adapter.B.shape, generator=generator))
            adapter.m.mul_(1 + 0.2 * torch.randn(adapter.m.shape, generator=generator))
    return model


def packed(oracle, model):
    """Every adaptable matrix of ours in INT4, and the numbers it holds in the oracle's."""
    codec = Int4(16)
    for name, linear in [*model.named_modules()]:
        if not isinstance(linear, Linear) or name == "lm_head":
            continue
        parts = codec.quantize(linear.weight.detach())
        new = Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            codec=codec,
            dtype=torch.float32,
            device="cpu",
        )
        for suffix, part in parts.items():
            getattr(new, suffix).copy_(part)
        new.bias = linear.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
        oracle.get_submodule(name).weight.data = new.matrix().clone()
    return oracle, model


def pair(tiny, case, tmp_path):
    """(peft's model, ours) with the same adapter, as after training; biases, which begin at zero, are drawn."""
    oracle = tiny.reference(case.removesuffix("-int4"))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    model = tiny.ours(oracle)
    if case.endswith("-int4"):
        oracle, model = packed(oracle, model)
    attach(model, CONFIGURED, seed=0)
    save_adapter(moved(model), tmp_path)
    return peft.PeftModel.from_pretrained(oracle, tmp_path, is_trainable=True), model


def loss(logits):
    return (logits @ PROBE).square().mean()


def gradients(theirs):
    named = theirs.named_parameters()
    return {name.removeprefix("base_model.model."): p.grad for name, p in named if p.requires_grad}


def difference(model, theirs):
    """The largest of a gradient, relative to the largest element."""
    expected = gradients(theirs)
    worst = 0.0
    for site in sites(model):
        for half, name in NAMES.items():
            want = expected[f"{site.name}.{name}"]
            error = (getattr(site.adapter, half).grad - want).abs().max()
            worst = max(worst, float(error / max(1.0, float(want.abs().max()))))
    return worst


@pytest.mark.parametrize("case", ["llama", "qwen2", "llama-int4"])
def test_outputs_gradients_and_ten_steps_equal_pefts(tiny, case, tmp_path):
    theirs, model = pair(tiny, case, tmp_path)
    base = tiny.logits(model).detach()
    ours = AdamW(model, betas=(0.9, 0.95), eps=1e-8)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    other = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(10):
        a, b = tiny.logits(model), tiny.oracle_logits(theirs)
        assert (a - b).detach().abs().max() < 1e-5 * b.detach().abs().max()
        ours.zero_grad()
        other.zero_grad()
        loss(a).backward()
        loss(b).backward()
        if step == 0:  # later Adam has amplified the last bits of tiny gradients
            assert difference(model, theirs) < 1e-5
        ours.update(1e-3, 0.0)
        other.step()
    with torch.no_grad():
        assert (tiny.logits(model) - tiny.oracle_logits(theirs)).abs().max() < 1e-5 * float(base.abs().max())
        assert (tiny.logits(model) - base).abs().max() > 1e-2  # control: ten steps change something


def formula(tensors, fault=""):
    """DoRA in float64, or with a mistake. tensors: x, W, b, A, B, m."""
    x, W, b, A, B, m = tensors
    V = W + 2 * B @ A
    norm = V.norm(dim=0 if fault == "columns" else 1)
    gain = m / (norm if fault == "gradient" else norm.detach())
    return (x @ V.t() + b) * gain if fault == "bias" else x @ V.t() * gain + b


def results(y, leaves, dy):
    """The output, and the gradients of x, b, A, B and m."""
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def apart(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("codec", [None, Int4(8)])
def test_a_square_layer_with_a_bias_is_pefts_and_float64s(codec):
    """Square, so that a norm of columns has the right shape; the control arms are three likely mistakes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 24), "W": (24, 24), "b": (24,), "A": (4, 24), "B": (24, 4), "m": (24,)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dy = torch.randn(5, 24, generator=generator)
    ours = Linear(24, 24, bias=True, codec=codec, dtype=torch.float32, device="cpu")
    if codec is None:
        ours.weight.data = drawn["W"]
    else:
        for suffix, part in codec.quantize(drawn["W"]).items():
            getattr(ours, suffix).copy_(part)
        drawn["W"] = ours.matrix()
    ours.bias.data, ours.adapter = drawn["b"].clone(), Dora(24, 24, 4, 2.0)
    for name in "ABm":
        getattr(ours.adapter, name).data = drawn[name].clone()

    layers = torch.nn.Sequential(torch.nn.Linear(24, 24))
    layers[0].weight.data, layers[0].bias.data = drawn["W"].clone(), drawn["b"].clone()
    config = peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["0"])
    theirs = peft.get_peft_model(layers, config)
    named = {half: theirs.get_parameter(f"base_model.model.0.{name}") for half, name in NAMES.items()}
    for name, parameter in named.items():
        parameter.data = drawn[name].clone()
    bias = layers[0].bias.requires_grad_()

    x = drawn["x"].requires_grad_()
    own = results(ours(x), (x, ours.bias, *(getattr(ours.adapter, name) for name in "ABm")), dy)
    assert apart(own, results(theirs(x), (x, bias, *named.values()), dy)) < 1e-5
    exact = {name: drawn[name].detach().double().requires_grad_() for name in shapes}
    leaves = [exact[name] for name in ("x", "b", "A", "B", "m")]
    assert apart(own, results(formula(exact.values()), leaves, dy.double())) < 1e-5
    for fault in ("bias", "gradient", "columns"):
        assert apart(own, results(formula(exact.values(), fault), leaves, dy.double())) > 1e-2


def undetached(self, linear):
    """The control arm: the norm has a gradient."""
    A, B, scale = self.factors()
    return torch.linalg.norm(linear.matrix() + scale * (B @ A), dim=1)


def test_control_arms_a_norm_with_a_gradient_and_an_m_left_out_are_seen(tiny, tmp_path, monkeypatch):
    theirs, model = pair(tiny, "llama", tmp_path)
    loss(tiny.oracle_logits(theirs)).backward()
    loss(tiny.logits(model)).backward()
    assert difference(model, theirs) < 1e-5
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(Dora, "norm", undetached)
        logits = tiny.logits(model)
        loss(logits).backward()
    assert (logits - tiny.oracle_logits(theirs)).abs().max() < 1e-4 and difference(model, theirs) > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(Dora, "gain", lambda self, linear: torch.ones_like(self.m))
        assert (tiny.logits(model) - tiny.oracle_logits(theirs)).abs().max() > 1e-2


def test_a_norm_kept_past_an_update_is_seen(tiny, tmp_path, monkeypatch):
    """Control arm of the versions that AdamW raises: its kernels write by addresses."""
    model = tiny.model("llama")
    attach(model, CONFIGURED, seed=0)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: None)
    optimizer = AdamW(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss(tiny.logits(model)).backward()
        optimizer.update(0.1, 0.0)
    site = next(iter(sites(model)))
    wrong = site.adapter.norm(site.owner)
    right = torch.linalg.norm(
        site.owner.weight + site.adapter.scale * (site.adapter.B @ site.adapter.A), dim=1
    )
    kept = (wrong - right).abs().max() > 1e-3
    site.adapter._kept = None
    assert (site.adapter.norm(site.owner) - right).abs().max() < 1e-5
    assert kept


def test_a_folder_goes_both_ways(tiny, tmp_path):
    model = tiny.model("llama")
    attach(model, CONFIGURED, seed=0)
    save_adapter(moved(model), tmp_path / "ours")
    assert verify_adapter(model, tmp_path / "ours").matrices == 14
    assert json.loads((tmp_path / "ours" / CONFIG).read_text())["use_dora"] is True
    theirs = peft.PeftModel.from_pretrained(tiny.reference("llama"), tmp_path / "ours")
    assert (tiny.logits(model) - tiny.oracle_logits(theirs)).abs().max() < 1e-5

    # peft's own folder, of other targets
    config = peft.LoraConfig(r=3, lora_alpha=6, use_dora=True, target_modules=["q_proj", "down_proj"])
    made = peft.get_peft_model(tiny.reference("llama"), config)
    fresh = tiny.model("llama")
    attach(fresh, CONFIGURED, seed=0)
    assert torch.equal(tiny.logits(fresh), tiny.logits(tiny.model("llama")))  # a new one changes nothing
    start = made.get_parameter(f"base_model.model.model.layers.0.self_attn.q_proj.{NAMES['m']}")
    assert (fresh.model.layers[0].self_attn.q_proj.adapter.m - start).abs().max() < 1e-6
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    made.save_pretrained(tmp_path / "theirs")
    read = tiny.model("llama")
    load_adapter(read, tmp_path / "theirs")
    assert (tiny.logits(read) - tiny.oracle_logits(made)).abs().max() < 1e-5
    fields = lora_of(tmp_path / "theirs")
    assert fields["dora"] is True and fields["rank"] == 3 and len(sites(read)) == 4

    # a changed m is no longer the model's
    tensors = load_file(tmp_path / "ours" / WEIGHTS)
    name = next(name for name in tensors if name.endswith("lora_magnitude_vector"))
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, tmp_path / "ours" / WEIGHTS)
    with pytest.raises(AdapterError, match="m is not the file's"):
        verify_adapter(model, tmp_path / "ours")


@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_against_float64(size, dtype):
    """W Aᵀ in bf16 is off by 2^-9 of itself: of the norm that is less than its own rounding to bf16, as peft
    does, as long as ΔW is not larger than W."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(256, 96, dtype=dtype, device="cpu")
    linear.weight.data = torch.randn(96, 256, generator=generator).to(dtype)
    adapter = Dora(256, 96, 8, 2.0)
    with torch.no_grad():
        adapter.A.copy_(torch.randn(8, 256, generator=generator))
        adapter.B.copy_(size / 6 * torch.randn(96, 8, generator=generator))
    exact = torch.linalg.norm(
        linear.weight.double() + 2 * (adapter.B.double() @ adapter.A.double()), dim=1
    ).detach()
    error = ((adapter.norm(linear) - exact).abs() / exact).max()
    assert error < 1e-6  # on a CPU W Aᵀ is float32
    thin = linear.product(adapter.A.to(torch.bfloat16).to(dtype)) if dtype is torch.bfloat16 else None
    if thin is not None:  # as on a GPU
        squares = linear.weight.float().square().sum(1)
        norm = row_norms(squares, thin.float().t(), adapter.A, adapter.B, 2.0)
        assert ((norm - exact).abs() / exact).max() < 2**-8 * min(1.0, 2 * size)


def test_a_recomputed_layer_has_the_gradients_of_one_that_is_not(tiny):
    model = moved_llama(tiny)
    linear = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    linear(x).square().sum().backward()
    plain = [p.grad.clone() for p in linear.adapter.parameters()]
    for kind in ("reuse", "skip"):  # skip: nobody reads the output again, and m's gradient still needs it
        linear.adapter.zero_grad()
        saved = Saved()
        with torch.no_grad():
            y = linear(x, getattr(saved, kind))
        saved.second = True
        linear(x, getattr(saved, kind)).backward(2 * y)
        assert all(torch.equal(p.grad, g) for p, g in zip(linear.adapter.parameters(), plain, strict=True))


def moved_llama(tiny):
    model = tiny.model("llama")
    attach(model, CONFIGURED, seed=0)
    return moved(model)


def test_scale_0_is_the_base_and_amplified_is_further_from_it(tiny):
    """As the receipt switches it off and makes it louder."""
    base, model = tiny.logits(tiny.model("llama")), moved_llama(tiny)
    part = _Part([(site.adapter, site.group) for site in sites(model)], [])
    own = tiny.logits(model)
    with _only(model, part, Snapshot(), _Variant("")):
        assert (tiny.logits(model) - base).abs().max() < 1e-5
    with _only(model, part, Snapshot(), _Variant("attention", 4096.0)):
        assert (tiny.logits(model) - base).abs().max() > (own - base).abs().max()
    assert torch.equal(tiny.logits(model), own)


def test_generation_of_latent_attention_multiplies_by_the_whole_weight(tiny):
    """kv_b_proj is absorbed in steps, and in prefill it is a layer."""
    model = tiny.model("deepseek")
    attach(model, LoraConfig(rank=2, alpha=4.0, targets=("attention",), dora=True), seed=0)
    moved(model).eval().requires_grad_(False)
    engine = Engine(model, stop_ids=frozenset())
    prompt = [5, 17, 3, 58]
    answer = engine.generate([prompt], Sampling(6, temperature=0.0))[0].tokens
    tokens = [*prompt]
    for token in answer:
        assert int(tiny.logits(model, [tokens])[-1].argmax()) == token
        tokens.append(token)


@pytest.mark.parametrize("targets", [("all-linear",), ("experts",), ("shared_experts",)])
def test_experts_of_a_mixture_are_refused_by_name_with_what_works(tiny, targets):
    model = tiny.model("deepseek")
    with pytest.raises(AdapterError, match="peft has no DoRA in the MLPs of a mixture") as error:
        attach(model, LoraConfig(rank=2, targets=targets, dora=True), seed=0)
    assert "--lora.targets attention" in error.value.next and not sites(model)
    attach(model, LoraConfig(rank=2, targets=("attention",), dora=True), seed=0)
    # and so says peft
    config = peft.LoraConfig(use_dora=True, target_parameters=["mlp.experts.down_proj"], target_modules=[])
    with pytest.raises(ValueError, match="does not work with use_dora"):
        peft.get_peft_model(tiny.reference("deepseek"), config)


def test_what_reads_no_dora_is_refused_by_name(tiny, tmp_path):
    model = moved_llama(tiny)
    with pytest.raises(AdapterError, match="reads no DoRA"):
        save_adapter(model, tmp_path / "x", "per-expert")
    with pytest.raises(AdapterError, match="cannot be one of several"):
        Several(model, name="mine")
    with pytest.raises(AdapterError, match="reads the weights, and those of"):
        from unfreeze import models

        shape = models.shape(tiny.reference("llama").config.to_dict())
        attach(models.build(shape, dtype=torch.float32, device="meta"), CONFIGURED, seed=0)


def test_the_norm_is_never_the_whole_matrix(monkeypatch):
    """W + ΔW is not formed: squares are summed in slabs, and W Aᵀ is thin."""
    seen = []
    monkeypatch.setattr(dora_file, "SLAB_BYTES", 8 * 64 * 10)
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **k: seen.append(x.shape) or norm(x, **k))
    dora_file.row_squares(torch.randn(35, 64))
    assert seen == [(10, 64)] * 3 + [(5, 64)]
