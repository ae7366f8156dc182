"""unfreeze.swap in memory: what stays has its bits, what is new trains, what is written loads again to the bit."""

import pytest
import torch

import unfreeze
from tests.compress.planted_parts import PLANTED
from tests.compress.test_swap import ATTENTION, IDS, assert_same_bits, ours, tensors
from tests.compress.test_upcycle import BIASED, MOE, logits, random_model
from unfreeze.core.batch import Batch
from unfreeze.core.errors import CheckpointError, UserError
from unfreeze.generate.model import Model
from unfreeze.models.parts import PARTS
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW


@pytest.fixture
def llama(tmp_path):
    return random_model(tmp_path / "llama", "Llama", {}, torch.bfloat16)


def batch() -> Batch:
    tokens = torch.tensor(IDS)
    return Batch(tokens, tokens.roll(-1), torch.ones(40), torch.arange(40), torch.tensor([0]))


def steps(model: Model, count: int, rate: float = 1e-3) -> list[float]:
    """The losses of a loop of one's own (examples/sft_loop.py)."""
    optimizer, losses = AdamW(model.decoder, weight_decay=0.0), []
    for _ in range(count):
        loss = cross_entropy(model.decoder.hidden(batch()), model.decoder.lm_head, batch())
        optimizer.zero_grad()
        (loss.sum / 40).backward()
        optimizer.collect()
        optimizer.update(rate, 1.0)
        losses.append(float(loss.sum.detach()) / 40)
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "DeepseekV3", "tiny-k2"])
def test_full_for_itself_leaves_every_logit(kind, dtype, tmp_path):
    if kind == "tiny-k2":
        folder = unfreeze.TINY_K2
    else:
        settings = MOE | BIASED["deepseek_v3"][1] if kind == "DeepseekV3" else {"tie_word_embeddings": True}
        folder = random_model(tmp_path / "model", kind, settings, torch.bfloat16)
    model = unfreeze.load(folder, dtype=dtype)
    same = unfreeze.swap(model, ATTENTION, "full")
    assert type(same) is Model
    assert torch.equal(same.logits([IDS])[0], model.logits([IDS])[0])
    assert same.manifest.config == model.manifest.config
    if kind != "tiny-k2" and dtype == "float32":  # and both are the oracle's
        ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
        assert (torch.stack(same.logits(ids)) - logits(folder)).abs().max() <= 1e-4
    # control arm: a part that computes something else
    if kind in ("Llama", "Qwen3"):
        other = unfreeze.swap(model, ATTENTION, "sliding_window", window=2)
        assert not torch.equal(other.logits([IDS])[0], model.logits([IDS])[0])


def test_a_swapped_model_trains_at_once_and_the_given_one_stays(llama):
    model = unfreeze.load(llama, dtype="float32")
    before = model.logits([IDS])[0]
    new = unfreeze.swap(model, ATTENTION, "qk_norm")
    names = {name for name, parameter in new.decoder.named_parameters() if parameter.requires_grad}
    assert names == {name for name, _ in new.decoder.named_parameters()}
    optimizer = AdamW(new.decoder, weight_decay=0.0)
    assert optimizer.parameters.keys() == names
    assert {name for name in names if "q_norm" in name} == {
        f"model.layers.{layer}.self_attn.q_norm.weight" for layer in range(3)
    }
    old = {id(parameter) for parameter in model.decoder.parameters()}
    assert not old & {id(parameter) for parameter in optimizer.parameters.values()}
    values = {name: parameter.detach().clone() for name, parameter in new.decoder.named_parameters()}
    first = new.generate(IDS[:4], max_new_tokens=6)
    losses = steps(new, 8)
    assert losses[-1] < losses[0] - 0.1
    assert all(not torch.equal(values[name], value) for name, value in new.decoder.named_parameters())
    assert torch.equal(model.logits([IDS])[0], before)
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert len(first) == len(new.generate(IDS[:4], max_new_tokens=6)) == 6
    # generation sees the trained weights: its choice is that of the logits
    assert new.generate(IDS, max_new_tokens=1)[0] == int(new.logits([IDS])[0][-1].argmax())


def test_untouched_parameters_have_the_same_bits(llama, planted_parts):
    model = unfreeze.load(llama, dtype="bfloat16")
    new = unfreeze.swap(model, "layers.1.self_attn", "narrow", init="new", seed=5)
    before, after = model.decoder.state_dict(), new.decoder.state_dict()
    assert before.keys() == after.keys()
    inside = "model.layers.1.self_attn."
    for name, tensor in before.items():
        if not name.startswith(inside):
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert after[f"{inside}k_proj.weight"].shape == (16, 64)
    assert not torch.equal(after[f"{inside}q_proj.weight"], before[f"{inside}q_proj.weight"])
    # control arm: the guard of the bits sees one that moved
    with torch.no_grad():
        new.decoder.layers[0].self_attn.q_proj.weight[0, 0] += 1
    assert not torch.equal(
        new.decoder.state_dict()["model.layers.0.self_attn.q_proj.weight"],
        before["model.layers.0.self_attn.q_proj.weight"],
    )


def test_packed_experts_are_shared_and_kept(tmp_path, planted_parts):
    model = unfreeze.load(unfreeze.TINY_K2, dtype="float32")
    new = unfreeze.swap(model, ATTENTION, "gated", seed=1)
    codes = "model.layers.1.mlp.experts.down_proj.weight_packed"
    assert new.decoder.state_dict()[codes].data_ptr() == model.decoder.state_dict()[codes].data_ptr()
    steps(new, 2)
    saved = tensors(new.save(tmp_path / "saved"))
    before = tensors(unfreeze.TINY_K2)
    assert saved.keys() - before.keys() == {
        f"model.layers.{layer}.self_attn.out_gate.weight" for layer in range(4)
    }
    assert_same_bits(
        {name: before[name] for name in before if ".experts." in name and "shared" not in name}, saved
    )
    again = unfreeze.load(tmp_path / "saved", dtype="float32")
    assert torch.equal(again.logits([IDS])[0], new.logits([IDS])[0])
    with pytest.raises(UserError, match="is packed in"):
        unfreeze.swap(model, "layers.1", "unpacked")


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_saved_loads_again_to_the_bit(trained, llama, tmp_path):
    model = unfreeze.swap(unfreeze.load(llama, dtype="float32"), ATTENTION, "qk_norm")
    if trained:
        steps(model, 2)
    again = unfreeze.load(model.save(tmp_path / "saved"), dtype="float32")
    written = tensors(tmp_path / "saved")
    for name, tensor in model.decoder.state_dict().items():
        assert torch.equal(written[name].float(), tensor), name
    # weights that did not train have the bytes of the file that they came from
    assert {tensor.dtype for tensor in written.values()} == {torch.float32 if trained else torch.bfloat16}
    assert torch.equal(again.logits([IDS])[0], model.logits([IDS])[0])
    assert again.manifest.config["parts"] == [{"at": ATTENTION, "part": "qk_norm"}]
    with pytest.raises(CheckpointError, match="not empty"):
        model.save(tmp_path / "saved")


def test_swaps_follow_each_other_and_a_path_is_loaded(llama, tmp_path):
    one = unfreeze.swap(llama, ATTENTION, "sliding_window", window=4)
    two = unfreeze.swap(one, "layers.0.self_attn", "qk_norm")
    assert [part["part"] for part in two.manifest.config["parts"]] == ["sliding_window", "qk_norm"]
    assert torch.equal(
        ours(two.save(tmp_path / "two")), unfreeze.load(tmp_path / "two", "float32").logits([IDS])[0]
    )
    alone = Model(two.decoder)  # made by hand: it swaps, and has no files to save with
    three = unfreeze.swap(alone, "layers.1.self_attn", "qk_norm")
    assert len(three.decoder.shape.parts) == 5
    with pytest.raises(CheckpointError, match="was not loaded from files"):
        three.save(tmp_path / "three")


def test_what_does_not_fit_is_refused(llama, planted_parts):
    model = unfreeze.load(llama)
    for arguments, options, message in (
        (("layers.*.attn", "full"), {}, "names no place"),
        ((ATTENTION, "sliding_windov"), {}, "nearest: 'sliding_window'"),
        ((ATTENTION, "sliding_window"), {"windov": 3}, "nearest: 'window'"),
        ((ATTENTION, "full"), {"init": "cpoy"}, "nearest: 'copy'"),
        ((ATTENTION, "narrow"), {}, "narrow needs"),
    ):
        with pytest.raises(UserError, match=message):
            unfreeze.swap(model, *arguments, **options)
    from unfreeze.adapters import attach
    from unfreeze.config.lora import LoraConfig

    attach(model.decoder, LoraConfig(rank=2), 0)
    with pytest.raises(CheckpointError, match="has adapters"):
        unfreeze.swap(model, ATTENTION, "full")
    with pytest.raises(CheckpointError, match="has adapters"):
        model.save("never")


def test_a_planted_copy_of_wrong_weights_is_seen(llama, monkeypatch):
    """The control arm of identity: one weight of another layer."""
    from unfreeze.compress import swap_model

    hand_over = swap_model.hand_over

    def wrong(after, by_id, device):
        for name in ("model.layers.0.self_attn.o_proj.weight",):
            by_id[id(after.get_parameter(name))] = by_id[id(after.get_parameter(name.replace(".0.", ".1.")))]
        hand_over(after, by_id, device)

    model = unfreeze.load(llama, dtype="float32")
    monkeypatch.setattr(swap_model, "hand_over", wrong)
    other = unfreeze.swap(model, ATTENTION, "full")
    assert not torch.equal(other.logits([IDS])[0], model.logits([IDS])[0])


def test_the_registry_is_not_changed_by_the_tests():
    assert not PLANTED.keys() & PARTS.keys()
