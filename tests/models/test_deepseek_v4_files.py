"""DeepSeek-V4's release: FP8 with power-of-two scales called `scale`, experts in MXFP4, compressors in bf16.

The numbers of codes are those of transformers' own dequantization.
"""

import copy
import json

import pytest
import torch
import transformers
from cases_sparse import V4
from family_cases import DOCUMENTS, NO_IDS, SMALL, batch_of, randomized
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.work import KIMI
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.mxfp4 import BESIDE, Mxfp4

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
CODECS = {"fp8": Fp8((128, 128), "F8_E8M0", "scale"), "fp4": Mxfp4(BESIDE, "F8_E8M0")}
DENSE = ("compressor", "weights_proj", "gate.weight", "head.weight", "embed.weight", "norm", "tid2eid", "hc_")


def codec_of(name, tensor):
    if tensor.dim() != 2 or any(part in name for part in DENSE):
        return None
    return CODECS["fp4" if ".experts." in name else "fp8"]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """(a folder as published, transformers' model with the numbers of its codes)."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "q_lora_rank": 128}
    sizes |= {"o_lora_rank": 64, "index_n_heads": 16, "index_head_dim": 16, "hc_mult": 2, "head_dim": 64}
    fields = {**SMALL, **NO_IDS, **copy.deepcopy(V4), **sizes, "rms_norm_eps": 1e-5, "initializer_range": 0.1}
    torch.manual_seed(0)
    reference = randomized(transformers.DeepseekV4ForCausalLM, transformers.DeepseekV4Config(**fields))
    folder = tmp_path_factory.mktemp("release")
    reference.save_pretrained(folder)
    model = open_model(open_checkpoint(folder))
    config = {**model.shape.config, "dtype": "bfloat16"}
    files, numbers, dequantize = {}, {}, Fp8Dequantize(None)
    for name, tensor in published(model, config):
        codec = codec_of(name, tensor)
        if codec is None:
            files[name] = tensor.contiguous()
            numbers[name] = tensor
            continue
        parts = codec.quantize(tensor.float())
        files |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        numbers[name] = dequantize._dequantize_one(parts["weight"], parts["scale"], torch.float32)
    plain = tmp_path_factory.mktemp("plain")
    for at, tensors, more in (
        (plain, numbers, {}),
        (folder, files, {"quantization_config": FP8, "expert_dtype": "fp4", "dtype": "bfloat16"}),
    ):
        text = json.loads((folder / "config.json").read_text()) | more
        (at / "config.json").write_text(json.dumps(text))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, at / "model.safetensors")
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return folder, transformers.AutoModelForCausalLM.from_pretrained(plain, **options).eval()


def test_the_release_is_read_in_its_formats_and_equals_transformers(release):
    folder, reference = release
    model = open_model(open_checkpoint(folder))
    attention, experts = model.layers[1].self_attn, model.layers[1].mlp.experts
    for linear in (attention.q_a_proj, attention.o_a_proj, attention.compressor.indexer.q_b_proj):
        assert linear.codec == CODECS["fp8"]
    assert experts.gate_up_proj.codec == experts.down_proj.codec == CODECS["fp4"]
    assert attention.compressor.kv_proj.codec is None
    ours = model.logits(model.hidden(batch_of(DOCUMENTS)))
    theirs = torch.cat([reference(torch.tensor([document])).logits[0] for document in DOCUMENTS])
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_adapters_on_the_release_have_transformers_gradient_at_the_embedding(release):
    """Through packed products, o_a_proj's too: the gradient of the embeddings."""
    folder, reference = release
    model = open_model(open_checkpoint(folder))
    model.requires_grad_(False)
    attach(model, LoraConfig(rank=2), seed=0)  # B is zero: the logits stay
    model.model.embed_tokens.weight.requires_grad_()
    document = DOCUMENTS[2]
    model.logits(model.hidden(batch_of([document]), models.selective)).log_softmax(-1)[:, 3].sum().backward()
    reference(torch.tensor([document])).logits[0].log_softmax(-1)[:, 3].sum().backward()
    own, theirs = model.model.embed_tokens.weight.grad, reference.model.embed_tokens.weight.grad
    assert (own - theirs).norm() <= 1e-4 * theirs.norm()


def test_the_config_alone_says_the_same(release):
    folder, _ = release
    manifest = open_checkpoint(folder)
    declared = models.from_config(manifest.config, torch.bfloat16)
    stored = models.meta_model(declared.shape, manifest, torch.bfloat16)
    kinds = [{n: m.codec for n, m in x.named_modules() if hasattr(m, "codec")} for x in (declared, stored)]
    differ = {name for name in kinds[0] if kinds[0][name] != kinds[1][name]}
    assert differ <= {"lm_head"}
    assert sum(t.nbytes for t in load_file(folder / "model.safetensors").values()) > 0


def test_a_width_that_no_group_divides_leaves_down_proj_alone_unpacked():
    """As `merge --to int4` writes experts of width 48: gate and up packed in groups of 32, down in bf16."""
    config = transformers.DeepseekV4Config(**{**SMALL, **NO_IDS, **copy.deepcopy(V4)}).to_dict()
    shape = models.shape(config)
    packed = models.build(
        shape,
        dtype=torch.bfloat16,
        codec_for=lambda module: KIMI if module.endswith(".experts.gate_up_proj") else None,
    )
    experts = packed.layers[1].mlp.experts
    assert experts.gate_up_proj.codec is not None and experts.down_proj.codec is None
    assert experts.down_proj.weight.shape == (8, 64, 48)
