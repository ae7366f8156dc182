"""Several adapters in one batch: every row's logits are those of its adapter alone, in prefill and in every step."""

from __future__ import annotations

import functools

import pytest
import torch
from exact import EXACT, SEEN, each_maker, family, packed, some

from tests.adapters.drawn import drawn
from unfreeze.adapters import with_adapters
from unfreeze.adapters.several import Several
from unfreeze.generate.engine import batch_of
from unfreeze.generate.recorded import Recorded
from unfreeze.generate.steps import launched
from unfreeze.quant import Int4

WIDE = {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 16, "vocab_size": 96}
CASES = {
    "dense, head too": ("qwen3", {}, ("all-linear", "lm_head")),
    "latent attention and INT4 experts": ("deepseek-v3-groups-yarn", WIDE, ("all-linear",)),
}
OTHERS = {
    "experts whose rows are in turn": ("gpt-oss", {}, ("all-linear",)),
    "inputs scaled before experts": ("llama4-text", {}, ("all-linear", "lm_head")),
    "a shared expert with a gate": ("qwen2-moe", {}, ("all-linear",)),
    "no operation for its attention": ("kimi-linear", {}, ("all-linear",)),
    "a table of long positions": ("phi3-longrope-tied", {}, ("all-linear",)),
}
WHO = ("one", "", "sixteen", "four", "four", "few", "", "sixteen")
STEPS = 6


@functools.cache
def model_of(case):
    name, sizes, targets = (CASES | OTHERS)[case]
    _, model = family(name, **sizes)
    model = packed(model, Int4(32)) if sizes else model
    ranks = {"one": 1, "four": 4, "sixteen": 16}
    sets = {who: drawn(model, rank, seed, targets) for seed, (who, rank) in enumerate(ranks.items())}
    sets["few"] = {place: each for place, each in sets["four"].items() if place.endswith("o_proj")}
    return model, sets


@torch.no_grad()
def walked(model, steps, before=lambda turn: None, who=WHO):
    """Logits [1 + STEPS, S, V] of prompts of 3 to 10 tokens and steps of random tokens."""
    prompts = [some(3 + i, i) for i in range(len(who))]
    cache = model.new_cache(len(who), 10 + STEPS)
    batch = batch_of(prompts)
    ends_S = batch.starts_S + torch.tensor(batch.lengths()) - 1
    before(0)
    logits = [model.logits(model.prefill(batch, cache)[ends_S])]
    step = steps(model, cache)
    for turn in range(STEPS):
        before(turn + 1)
        logits.append(step(some(len(who), 100 + turn)).clone())
    return torch.stack(logits)


def alone(model, sets, steps, who=WHO):
    """The same, where each row's logits are of a batch that has its adapter throughout."""
    walks = {}
    for name in set(who):
        with with_adapters(model, sets.get(name, {})):
            walks[name] = walked(model, steps, who=who)
    return torch.stack([walks[name][:, row] for row, name in enumerate(who)], 1)


def apart(logits, wanted):
    return float((logits - wanted).abs().max() / wanted.abs().max())


@pytest.fixture
def bare():
    """bare(model, sets) -> all of them loaded; the model is bare again afterwards."""
    models = []

    def loaded(model, sets):
        models.append(model)
        result = Several(model)
        for name, adapters in sets.items():
            result.put(name, adapters)
        return result

    yield loaded
    for model in models:
        model.assigned.assign([])
        for module in model.modules():
            if getattr(module, "each", None) is not None:
                module.each = None


def exact(case, steps, bare):
    model, sets = model_of(case)
    wanted = alone(model, sets, steps)
    assert min(apart(wanted[:, i], wanted[:, j]) for i, j in ((0, 1), (2, 3))) > SEEN
    several = bare(model, sets)
    versions = [several.version(name) for name in WHO]
    assert apart(walked(model, steps, lambda turn: several.assign(versions)), wanted) <= EXACT
    # control arms: one row has its neighbour's adapter, or none, in one step
    for wrong in (several.version("one"), several.version("")):
        planted = [*versions[:2], wrong, *versions[3:]]
        logits = walked(model, steps, lambda turn: several.assign(planted if turn == STEPS else versions))  # noqa: B023
        assert apart(logits[:STEPS], wanted[:STEPS]) <= EXACT
        assert apart(logits[STEPS, 2], wanted[STEPS, 2]) > SEEN


@pytest.mark.parametrize("steps", [Recorded, launched])
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_its_adapter_alone(case, steps, bare):
    exact(case, steps, bare)


@pytest.mark.nightly
@each_maker
@pytest.mark.parametrize("case", OTHERS)
def test_each_row_is_its_adapter_alone_in_other_families(case, steps, bare):
    exact(case, steps, bare)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_assignment_and_adapters_that_come_and_go_between_steps(seed, bare):
    """Rows keep theirs while others are dropped, replaced and loaded with a greater rank: a program sees it."""
    model, sets = model_of("latent attention and INT4 experts")
    draw = torch.Generator().manual_seed(seed)
    who = tuple(WHO[i] for i in torch.randint(len(WHO), (5,), generator=draw))
    wanted = alone(model, sets, Recorded, who)
    several = bare(model, {name: sets[name] for name in ("one", "four", "few")})
    targets = CASES["latent attention and INT4 experts"][2]
    several.put("sixteen", drawn(model, 2, 9, targets))  # replaced before it is used
    several.put("sixteen", sets["sixteen"])
    versions = [several.version(name) for name in who]
    recordings = []

    def between(turn):
        recordings.append(model.assigned.changes)
        if turn == 2:
            for name in set(who) - {""}:
                several.put(name, drawn(model, 3, 7, targets))
        elif turn == 3:
            several.put("new", drawn(model, 40, 8, targets))
        elif turn == 4:
            several.drop("new")
            several.drop("few")
        several.assign(versions)

    assert apart(walked(model, Recorded, between, who), wanted) <= EXACT
    assert recordings[3] == recordings[0] < recordings[4] == recordings[5]  # only a greater rank records anew
    for version in versions:
        several.leave(version)
    held = {slot for module in model.modules() for table in tables(module) for slot in table.factors}
    assert held == {several.version(name).slot for name in several.names}


def tables(module):
    each = getattr(module, "each", None)
    return () if each is None else each.tables


def test_an_adapter_that_was_never_there_is_recorded_without_an_operation(bare):
    """Base and gate rows: layers without any adapter have the program that they had."""
    model, sets = model_of("dense, head too")
    bare(model, {"few": sets["few"]})
    assert sum(module.each is not None for module in model.modules() if hasattr(module, "each")) == len(
        sets["few"]
    )
