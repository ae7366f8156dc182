"""Each family from its files to its adapter: transformers' own save_pretrained read and written again, documents
apart, a receipt, peft's names, and the plan's bytes. Cached decoding: tests/generate/test_exact_families.py."""

import re
import warnings
from itertools import chain

import cases_mamba
import cases_moe
import peft
import pytest
import torch
from family_cases import CASES, DOCUMENTS, batch_of, oracle
from safetensors.torch import load_file

from unfreeze import models
from unfreeze.adapters import LoraConfig, Receipt, attach, load_adapter, save_adapter, sites, verify_adapter
from unfreeze.adapters.layouts import dropped
from unfreeze.adapters.readers import PEFT
from unfreeze.adapters.receipt import check
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.core.errors import AdapterError
from unfreeze.kernels.recurrence.segments import CHUNK, CHUNKS
from unfreeze.models.blocks.attention import ScaledValueAttention
from unfreeze.models.blocks.compressed import CompressedAttention
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.blocks.recurrent import ShortConv
from unfreeze.models.publish import carried, named_as_stored, published, stored_dtypes
from unfreeze.parallel.placement.place import place
from unfreeze.parallel.plan import measure_sizes
from unfreeze.parallel.plan.counts import counts

FIRST: dict[tuple[str, bool], str] = {}  # of each config class; Gemma 4's, with experts and without
for _name, _case in CASES.items():
    FIRST.setdefault((_case.config_class, _name in cases_moe.CASES), _name)
KINDS = sorted(FIRST.values())
WITH_EXPERTS = {*cases_moe.CASES, *cases_mamba.CASES, "kimi-linear", "lfm2-moe"}
AS_PUBLISHED = {"qwen3-vl-moe"}  # written with experts as published, which transformers turns round
FUSED = {"qwen3.5-moe", "qwen3.5-moe-nested"}  # written as the bf16 release is, one by one by transformers
LORA = LoraConfig(rank=4, alpha=8.0)


def opened(folder, dtype=torch.float32):
    """(our model of a folder, its manifest)."""
    manifest = open_checkpoint(folder)
    model = models.meta_model(models.shape(manifest.config), manifest, dtype)
    place(
        model,
        manifest,
        models.rules(model.shape),
        device="cpu",
        ignore=models.ignored(model.shape),
        tied=models.tied(model.shape),
    )
    return model, manifest


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """name -> (transformers' model, the folder that its save_pretrained wrote); made once."""
    made = {}

    def make(name):
        if name not in made:
            reference = oracle(name)
            folder = tmp_path_factory.mktemp(name)
            reference.save_pretrained(folder)
            made[name] = reference, folder
        return made[name]

    return make


class Kept:
    """The memory of what autograd saves, each block once."""

    def __init__(self):
        self.blocks = {}

    def note(self, tensor):
        if tensor.dim() < 2 or tensor.shape[-1] > 1:
            self.blocks[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def beyond(self, known):
        """Bytes of what is not the memory of `known`."""
        there = {tensor.untyped_storage().data_ptr() for tensor in known}
        return sum(t.untyped_storage().nbytes() for at, t in self.blocks.items() if at not in there)


def fused(tensors):
    """Experts one by one, stacked as Qwen3.5-35B-A3B is published: gate_up_proj [E, 2 I, D], down_proj."""
    one = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
    stacks = {}
    for key in [key for key in tensors if one.fullmatch(key)]:
        stack, expert, half = one.fullmatch(key).groups()
        stacks.setdefault(stack, {}).setdefault(int(expert), {})[half] = tensors.pop(key)
    for stack, experts in stacks.items():
        each = [experts[number] for number in range(len(experts))]
        tensors[f"{stack}gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
        tensors[f"{stack}down_proj"] = torch.stack([e["down"] for e in each])
    return tensors


def logits_of(reference, documents=DOCUMENTS):
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([document])).logits[0] for document in documents])


@pytest.mark.parametrize("name", KINDS)
def test_transformers_files_are_read_and_written_again_name_by_name(name, released, tmp_path):
    reference, folder = released(name)
    model, manifest = opened(folder)
    ours = model.logits(model.hidden(batch_of(DOCUMENTS))).detach()
    assert (ours - logits_of(reference)).abs().max() <= 1e-4

    written = published(model, manifest.config, dtypes=stored_dtypes(model, manifest))
    tensors = chain(named_as_stored(model, manifest, written), carried(model, manifest))
    save_checkpoint(tmp_path / "again", manifest.config, tensors)
    theirs, again = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "again"))
    theirs = fused(theirs) if name in FUSED else theirs
    assert again.keys() == theirs.keys() - models.tied(model.shape).keys()
    turned = {key for key, tensor in again.items() if tensor.shape != theirs[key].shape}
    assert bool(turned) == (name in AS_PUBLISHED)
    assert all(torch.equal(t.mT if key in turned else t, theirs[key]) for key, t in again.items())
    # and what was written is read again: as published
    once_more, _ = opened(tmp_path / "again")
    assert torch.equal(once_more.logits(once_more.hidden(batch_of(DOCUMENTS))).detach(), ours)


@pytest.mark.parametrize("name", KINDS)
def test_no_attention_across_documents(name, released):
    model, _ = opened(released(name)[1])
    seen = {}
    model.model.embed_tokens.register_forward_hook(
        lambda _m, _i, out: seen.setdefault("x", out.detach().requires_grad_())
    )
    hidden = model.hidden(batch_of(DOCUMENTS))
    (gradient,) = torch.autograd.grad(hidden[7:9].square().sum(), seen["x"])
    assert gradient[7:9].abs().max() > 0
    assert not gradient[:7].any() and not gradient[9:].any()


@pytest.mark.parametrize("name", KINDS)
def test_every_group_learns_and_the_receipt_says_so(name, released):
    model, _ = opened(released(name)[1])
    attach(model, LORA, seed=0)
    receipt, batch = Receipt(model), batch_of([list(range(2, 97)), *DOCUMENTS])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    logits = model.logits(model.hidden(batch, models.keep_inputs))
    torch.nn.functional.cross_entropy(logits, batch.targets_T.roll(-1)).backward()
    optimizer.step()
    taken = receipt.take(batch)
    check(taken)
    trained = {group for group, entry in taken.groups.items() if entry["trained"]}
    inner = "experts" if model.moe_layers() else "mlp"
    assert {"attention", inner} <= trained <= {"attention", "experts", "mlp", "shared_experts"}
    linear = {
        module
        for module, part in model.named_modules()
        if isinstance(part, models.targets.Linear)
        and part.adaptable
        and models.targets.group_of(module) not in ("lm_head", "router", "indexer")
    }
    assert {site.name for site in sites(model) if site.group != "experts"} == linear


@pytest.mark.parametrize("name", KINDS)
def test_peft_over_transformers_gives_our_logits(name, released, tmp_path):
    model, manifest = opened(released(name)[1])
    bare = model.logits(model.hidden(batch_of(DOCUMENTS))).detach()
    attach(model, LORA, seed=0)
    for module in dropped(model, PEFT):
        model.get_submodule(module).adapter = None
    with torch.no_grad():
        for index, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(index)
            for key, parameter in site.adapter.named_parameters():
                if key.endswith("B"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    verify_adapter(model, save_adapter(model, tmp_path, "peft", base_name="tiny", prefix=manifest.prefix))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(oracle(name), tmp_path).eval()
    ours = model.logits(model.hidden(batch_of(DOCUMENTS))).detach()
    assert (ours - logits_of(theirs)).abs().max() <= 2e-4
    assert (ours - bare).abs().max() > 1e-2  # control: the adapter does something

    again, _ = opened(released(name)[1])
    load_adapter(again, tmp_path)
    assert torch.equal(again.logits(again.hidden(batch_of(DOCUMENTS))), ours)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind in WITH_EXPERTS])
def test_the_per_expert_layout_names_experts_as_the_files_do_or_is_refused(name, released, tmp_path):
    folder = released(name)[1]
    model, manifest = opened(folder)
    attach(model, LORA, seed=0)
    stored = {key.removesuffix(".weight") for key in load_file(folder / "model.safetensors")}
    try:
        save_adapter(model, tmp_path, "per-expert", prefix=manifest.prefix)
    except AdapterError as error:
        assert model.shape.model_type in error.message and "--for peft" in error.next
        assert not any(key.endswith(".mlp.experts.0.gate_proj") for key in stored)
        return
    names = {key.split(".lora_")[0] for key in load_file(tmp_path / "adapter_model.safetensors")}
    # Nemotron-H's files say backbone where transformers, peft and vLLM say model
    assert {name.partition(".layers.")[2] for name in names} <= {
        key.partition(".layers.")[2] for key in stored
    }


@pytest.mark.parametrize("runs", ["reference", "tiled"])
@pytest.mark.parametrize("name", KINDS)
def test_the_plan_has_the_files_bytes_and_the_activations_a_layer_keeps(name, runs, released, attention_runs):
    attention_runs(runs)
    _, folder = released(name)
    model, manifest = opened(folder)
    left = {*models.tied(model.shape), *(name for name, _ in carried(model, manifest))}
    stored = {k: t for k, t in load_file(folder / "model.safetensors").items() if k not in left}
    extra = sum(moe.counts_E.nbytes + moe.replayed_3.nbytes for moe in model.moe_layers().values())
    assert measure_sizes(model, None).base == sum(t.nbytes for t in stored.values()) + extra
    assert counts(model).moe_layers == len(model.moe_layers())

    # 2,048 rows of experts, as their buffers are rounded up to that; the adapters' own [T, 1] are left out
    attach(model, LoraConfig(rank=1), seed=0)
    T = 2048 // (model.shape.experts_per_token or 2)
    run = model.packed_pass(batch_of([[number % 97 for number in range(128)]] * (T // 128)))
    for layer in model.layers:
        x_TD = torch.randn(T, model.shape.stream_size).requires_grad_()
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda t: t):
            y_TD = layer(x_TD, run)
        tables = [table for tables in ((run.cos_Tr, run.sin_Tr), *run.named.values()) for table in tables]
        held = kept.beyond([*layer.parameters(), *layer.buffers(), x_TD, *tables]) + y_TD.nbytes
        counted = layer.bytes(torch.float32, "cpu")
        said, shape = counted.held * T, counted.attention
        del y_TD
        mixer = layer.attention
        if isinstance(mixer, CompressedAttention):
            pass  # its state is of generation only
        elif recurrent := mixer.state_bytes(torch.float32):
            # documents of one segment carry no state, which the plan counts for long ones
            windows = [part for part in layer.modules() if isinstance(part, ShortConv)]
            state = recurrent - sum(part.state_bytes(torch.float32) for part in windows)
            said -= T * -(-state // (CHUNKS["cpu"] * CHUNK))
        elif shape is None or shape.window is not None or shape.by_blocks:
            pass  # neither torch's attention nor tiles
        elif runs == "reference":
            # torch's own attention repeats keys and values
            said += 4 * T * (shape.heads - shape.key_heads) * (shape.width + shape.value_width)
        elif type(mixer) is MLA:
            # the plan counts torch's padded values; tiles read them where kv_b_proj wrote them
            said -= 4 * T * shape.heads * shape.value_width
        elif isinstance(mixer, ScaledValueAttention):
            # torch pads values and output, tiles do not
            said -= 4 * T * shape.heads * (2 * shape.width - shape.value_width)
        # beyond what is said: the rows' tokens and weights, and the adapters' thin products
        assert 0.97 <= held / said <= 1.12, (type(layer.mlp).__name__, held / said)


@pytest.mark.parametrize(
    "name", [kind for kind in KINDS if kind.startswith(("lfm2", "granite4", "nemotron"))]
)
def test_left_out_for_peft_is_what_peft_itself_refuses(name, released):
    model, _ = opened(released(name)[1])
    attach(model, LORA, seed=0)
    left_out = {module.rpartition(".")[2] for module in dropped(model, PEFT)}
    refused = set()
    for leaf in {site.name.rpartition(".")[2] for site in sites(model)} & {"in_proj", "out_proj"}:
        try:
            peft.get_peft_model(oracle(name), peft.LoraConfig(r=2, target_modules=[leaf]))
        except ValueError as error:
            refused.add(leaf)
            assert "incompatible" in str(error)
    assert left_out == refused
    assert bool(refused) == name.startswith("nemotron")
