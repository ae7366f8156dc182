"""Adapters by name, each in versions: taken up whole, kept by the answers that hold them, freed after the last;
adapters of another base or of other shapes are refused with the first tensor, and what was there stays.
"""

import json
import threading

import pytest
import torch

from tests.adapters.drawn import drawn
from unfreeze.adapters import load_adapter, save_adapter, sites, with_adapters
from unfreeze.adapters.several import Several, same_base
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError, UserError


@pytest.fixture
def saved(tiny, tmp_path):
    """saved(name, rank, kind, base) -> a folder with such an adapter."""

    def written(name, rank=4, kind="deepseek", base="the/base"):
        model = tiny.trained(tiny.model(kind), LoraConfig(rank=rank, alpha=8.0), seed=rank)
        save_adapter(model, tmp_path / name, "per-expert" if kind == "deepseek" else "peft", base_name=base)
        return tmp_path / name

    return written


def held(model):
    """Slots that some layer has."""
    owners = (each for each in map(lambda m: getattr(m, "each", None), model.modules()) if each is not None)
    return {slot for each in owners for table in each.tables for slot in table.factors}


@torch.no_grad()
def test_an_adapter_of_a_folder_answers_as_when_it_is_attached(tiny, saved):
    model, folder = tiny.model("deepseek"), saved("one")
    several = Several(model, "the/base")
    before = tiny.logits(model)
    several.assign([several.load("one", folder)] * 3)
    found = tiny.logits(model)
    alone = tiny.model("deepseek")
    load_adapter(alone, folder)
    torch.testing.assert_close(found, tiny.logits(alone), rtol=0, atol=1e-5)
    assert (found - before).abs().max() > 1e-2
    several.assign([several.version("")] * 3)
    assert torch.equal(tiny.logits(model), before) and not sites(model)


@torch.no_grad()
def test_an_attached_adapter_becomes_the_first(tiny):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=2))
    with pytest.raises(AdapterError, match="needs a name"):
        Several(model)
    attach_again = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=2))
    for model_ in (model, attach_again):  # as with ranks of their own
        for site in sites(model_):
            if site.group == "experts":
                site.adapter.down_scale *= 3
    wanted = tiny.logits(model)
    several = Several(attach_again, name="mine")
    several.assign([several.version("mine")] * 3)
    assert several.names == ["mine"] and not sites(attach_again)
    torch.testing.assert_close(tiny.logits(attach_again), wanted, rtol=0, atol=1e-5)


def test_a_version_lives_until_its_last_answer_ends(tiny, saved):
    several = Several(tiny.model("deepseek"))
    first = several.load("a", saved("v1"))
    assert several.version("a") == several.version("a") == first
    second = several.replace("a", saved("v2", rank=8))
    assert several.version("a") == second != first and hash(first) != hash(second)
    assert held(several.model) == {first.slot, second.slot}
    several.leave(first)
    assert held(several.model) == {first.slot, second.slot}  # one of two answers
    several.leave(first)
    assert held(several.model) == {second.slot}
    third = several.load("b", saved("v3", rank=2))
    assert third.slot == first.slot and third != first  # the slot is used again, the version is another
    several.drop("a")
    assert several.names == ["b"] and held(several.model) == {second.slot, third.slot}
    several.leave(second)
    several.leave(second)  # more than it was held: nothing
    assert held(several.model) == {third.slot}
    with pytest.raises(UserError, match="there is no adapter 'a'"):
        several.version("a")
    fourth = several.replace("b", saved("v4", rank=2))  # held by nobody: freed at once
    assert held(several.model) == {fourth.slot}


def test_what_is_copied_from_training_does_not_change_with_it(tiny):
    model = tiny.model("qwen3")
    training = drawn(model, 2, 0)
    several = Several(model)
    several.assign([several.put("live", training)] * 3)
    with torch.no_grad():
        before = tiny.logits(model)
        next(iter(training.values())).B.add_(1)
        assert torch.equal(tiny.logits(model), before)
        several.assign([several.put("live", training)] * 3)
        assert not torch.equal(tiny.logits(model), before)


# ---- refused


def refusal(call, *arguments):
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


def test_names_are_checked(tiny, saved):
    several = Several(tiny.model("deepseek"))
    assert "there is no adapter 'x'" in refusal(several.version, "x")
    several.load("poems", saved("poems"))
    assert "nearest: 'poems'" in refusal(several.version, "poem")
    assert "nearest: 'poems'" in refusal(several.replace, "poem", saved("poem"))
    assert "nearest: 'poems'" in refusal(several.drop, "poem")
    assert "already" in refusal(several.load, "poems", saved("again"))


def test_an_adapter_of_another_base_is_refused_and_the_old_version_stays(tiny, saved):
    several = Several(tiny.model("deepseek"), "models/base")
    version = several.load("a", saved("a"))
    said = refusal(several.replace, "a", saved("other", base="models/Another-7B"))
    assert "adapter 'a' was trained on Another-7B; this model is base" in said
    assert several.version("a") == version and held(several.model) == {version.slot}


def test_an_adapter_of_other_shapes_is_refused_with_name_tensor_and_shapes(tiny, saved):
    several = Several(tiny.model("deepseek"))
    wrong = saved("wide", kind="qwen3")
    said = refusal(several.load, "wide", wrong)
    assert "adapter 'wide'" in said and "first: model.layers." in said
    assert not several.names and not held(several.model)
    of_wide = drawn(tiny.model("llama"), 2, 0)
    several = Several(tiny.model("qwen3"))
    said = refusal(several.put, "wide", of_wide)
    assert "does not fit this model: model.layers.0.self_attn.q_proj has A (2, 32) and B (32, 2)" in said
    assert "maps 32 -> 64" in said


def test_scaled_positions_are_refused(tiny, saved):
    several, folder = Several(tiny.model("deepseek")), saved("long")
    (folder / "rope.json").write_text(json.dumps({"scaling": "yarn", "factor": 4.0}))
    assert "other positions" in refusal(several.load, "long", folder)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("moonshotai/Kimi-K2", "/models/kimi-k2", True),
        ("moonshotai/Kimi-K2", "moonshotai/Kimi-K2-Base", False),
        ("models/a/", "models/a", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base", False),
    ],
)
def test_the_name_of_a_base(one, other, same):
    assert same_base(one, other) is same


# ---- rows


@pytest.mark.parametrize(
    ("documents", "count", "owners"),
    [
        (((),), 3, "abc"),
        (((),), 6, "aabbcc"),  # each row's experts one by one
        (((2, 1, 3),), 6, "aabccc"),
        (((2, 1, 3),), 3, "abc"),  # the head sees the last tokens only
        (((2, 1, 3),), 12, "aaaabbcccccc"),
        (((2, 1, 3), (4, 1, 5)), 10, "aaaabccccc"),  # keys of what the cache holds
    ],
)
def test_whose_a_row_is(tiny, documents, count, owners):
    assigned = tiny.model("llama").assigned
    assigned.assign([0, 1, 2])
    assigned.documents(*documents)
    assert assigned.of_rows(count) == ["abc".index(owner) for owner in owners]


def test_rows_of_unknown_owners_are_refused_unless_all_have_the_same(tiny):
    assigned = tiny.model("llama").assigned
    assigned.assign([0, 1])
    assigned.documents([3, 4])
    assert "2 adapters in one pass of 2 sequences, 7 tokens: whose 5 rows" in refusal(assigned.of_rows, 5)
    assigned.assign([1, 1])
    assert assigned.of_rows(5) == [1] * 5
    assigned.assign([])
    assert assigned.of_rows(2) == [-1, -1]


def test_loading_in_other_threads_while_passes_run(tiny):
    """Passes read tables that others fill; each pass is that of its version."""
    model = tiny.model("deepseek")
    several = Several(model)
    sets = [drawn(model, rank, rank) for rank in (1, 2, 3, 4)]
    wanted = []
    with torch.no_grad():
        for adapters in sets:
            with with_adapters(model, adapters):
                wanted.append(tiny.logits(model))
    numbers = {several.put("a", sets[0]): 0}
    over = threading.Event()

    def load():
        turn = 0
        while not over.is_set():
            turn += 1
            numbers[several.put("a", sets[turn % 4])] = turn % 4

    loader = threading.Thread(target=load)
    loader.start()
    seen = set()
    try:
        for _ in range(60):
            version = several.version("a")
            several.assign([version, several.version(""), version])
            with torch.no_grad():
                logits = tiny.logits(model)
            several.leave(version)
            while version not in numbers:
                pass
            seen.add(numbers[version])
            torch.testing.assert_close(logits[-12:], wanted[numbers[version]][-12:], rtol=0, atol=1e-5)
    finally:
        over.set()
        loader.join()
    assert len(seen) > 1
