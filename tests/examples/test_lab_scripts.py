"""Small twins of the scripts of examples/lab: kept_logits, padding, padding_nan, sdpa, smoother_rope, additivity."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "lab"
NAMES = ("kept_logits", "padding", "padding_nan", "sdpa", "smoother_rope", "additivity", "studying")


@pytest.fixture(scope="module")
def lab():
    """The scripts, imported as modules; they find studying.py beside them."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(FOLDER))
    modules = {name: importlib.import_module(name) for name in NAMES}
    yield type("Scripts", (), modules)
    for name in NAMES:
        sys.modules.pop(name, None)
    patch.undo()


def documents(seed=0, lengths=(30, 128, 77, 24)):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=drawn) for n in lengths]


# kept_logits


def test_last_and_random_teach_as_many_tokens_and_last_the_last(lab):
    drawn = torch.Generator().manual_seed(0)
    for length in (100, 101, 300):
        each = {arm: lab.kept_logits.taught(arm, length, drawn) for arm in lab.kept_logits.ARMS}
        assert each["full"].sum() == length - 1 and not any(t[-1] for t in each.values())
        assert each["last"].sum() == each["random"].sum() == min(100, length - 1)
        assert bool(each["last"][length - 2]) and (length < 102 or not each["last"][: length - 101].any())


def test_the_last_columns_of_a_padded_batch_have_the_loss_of_the_packed_documents(lab):
    """The oracle holds all scores of rows padded on the left to 128; control: the first columns differ."""
    rows = documents()
    model = lab.studying.fresh(0)
    last = [torch.arange(len(row)) >= len(row) - 11 for row in rows]
    packed = lab.studying.mean_loss(model, lab.studying.packed(rows, last))

    padded = torch.stack([torch.cat((torch.zeros(128 - len(row), dtype=torch.int64), row)) for row in rows])
    seen = torch.stack([torch.arange(128) >= 128 - len(row) for row in rows])
    lab.studying.attend_eagerly(model, len(rows), seen)
    losses = lab.studying.each_loss(model, lab.studying.packed(list(padded))).view(len(rows), 128)
    assert float(packed.detach()) == pytest.approx(float(losses[:, -11:-1].mean()), rel=1e-5)
    assert float(packed.detach()) != pytest.approx(float(losses[:, :10].mean()), rel=1e-3)


def test_the_moments_are_those_of_numbers_that_are_known(lab, monkeypatch):
    """g ~ N(mean, 0.09) in 2,000 dimensions: |E g|² = 500 and tr Cov = 180, both without bias."""
    drawn = torch.Generator().manual_seed(0)
    gradient = lambda model, batch: 0.5 + 0.3 * torch.randn(2000, generator=drawn).double()  # noqa: E731
    monkeypatch.setattr(lab.kept_logits, "gradient", gradient)
    mean, signal, variance = lab.kept_logits.moments(None, iter(range(8)), 8)
    assert signal == pytest.approx(500, rel=0.02) and variance == pytest.approx(180, rel=0.05)
    assert float(mean @ mean) > 1.02 * signal  # the plain square would be too large


# padding


def test_paddings_row_has_no_gradient_and_no_reach_unless_it_is_seen(lab):
    model = lab.studying.fresh(0, 257, 128)
    tied = lab.studying.fresh(0, 257, 128, tie_word_embeddings=True)
    hidden = {}
    for arm in lab.padding.ARMS:
        batch, real_T = lab.padding.padded(arm, documents())
        gradient, reach = lab.padding.row_gradient(model, batch), lab.padding.reach(model, batch, real_T, 1)
        of_tied = lab.padding.row_gradient(tied, batch)
        hidden[arm] = model.hidden(batch)[real_T].detach()
        if arm in ("none", "masked", "right"):
            assert gradient == 0 and reach <= 1e-6 and of_tied > 0.01
        else:  # the controls
            assert gradient > 0.1 and reach > 0.1 and of_tied > 0.01
    assert (hidden["masked"] - hidden["none"]).abs().max() <= 1e-6
    assert (hidden["right"] - hidden["none"]).abs().max() <= 1e-5
    assert (hidden["seen"] - hidden["none"]).abs().max() > 0.1


def test_weight_decay_moves_a_row_without_a_gradient(lab):
    batch, _ = lab.padding.padded("masked", documents())
    norms = []
    for decay in (0.0, 0.1):
        model = lab.studying.fresh(0, 257, 128)
        before = model.model.embed_tokens.weight[256].detach().clone()
        lab.studying.fit(model, iter([batch] * 4), 4, 1e-2, decay=decay)
        norms.append(float(model.model.embed_tokens.weight[256].detach().norm() / before.norm()))
    assert norms[0] == 1 and 0.99 < norms[1] < 1


# padding_nan


@pytest.mark.parametrize(
    "arm", ["both", "no_padding_idx", "no_norm", "eps_1e-6", "bfloat16", "norm_in_float32"]
)
def test_the_nan_needs_padding_idx_and_the_norm_and_the_loss_hides_it(lab, arm):
    share, more, line = lab.padding_nan.study(arm, 0)
    assert more["loss"] == pytest.approx(4.5, abs=0.5) and more["bad_real"] == 0
    if arm == "both":
        assert share == 1 and more["bad_padding"] == 1
        assert "NaN first at model.layers.0.input_layernorm, 16 of 48 positions, none supervised" in line
        assert "zero rows + eps 1e-08, which is 0 in float16" in line
    else:
        assert share == 0 and more["bad_padding"] == 0
        # the head is cured by an eps that float16 holds, the backward of the norm is not
        assert (more["bad_parameters"] > 0) == (arm == "eps_1e-6") and (line != "") == (arm == "eps_1e-6")


def test_padding_inside_attention_would_show_in_the_loss(lab):
    _, more, _ = lab.padding_nan.study("attended", 0)
    assert more["loss"] != more["loss"] and more["bad_real"] > 0


# sdpa


def test_all_arms_compute_the_same_attention_and_the_same_step(lab):
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 48, 32, generator=drawn) for _ in range(3))
    eager, *others = (lab.sdpa.attention(arm, q, k, v) for arm in lab.sdpa.ARMS)
    assert all((o - eager).abs().max() <= 1e-5 for o in others)
    rows = list(torch.randint(0, 256, (2, 40), generator=drawn))
    losses = []
    for arm in lab.sdpa.ARMS:
        model = lab.studying.fresh(0, width=128)
        lab.sdpa.use(arm, model, 2)
        losses.append(float(lab.studying.mean_loss(model, lab.studying.packed(rows)).detach()))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_the_peak_of_memory_is_that_of_an_allocation_of_known_size(lab):
    for mib in (64, 192):
        # a block that is freed again before the call ends still counts
        peak = lab.sdpa.peak_mib(lambda mib=mib: torch.ones(mib * lab.sdpa.MIB // 4).sum())
        if peak is None:
            pytest.skip("the kernel does not let a process reset its peak")
        assert mib - 2 < peak < mib + 24


# smoother_rope


def test_a_question_is_for_a_needle_before_it_and_alone_weighs_1(lab):
    rope = lab.smoother_rope
    batch = next(rope.lessons(0, rope.TRAINED))
    for text, weights in zip(batch.tokens_T.view(-1, 256), batch.weights_T.view(-1, 256), strict=True):
        needles = {}
        for at, token in enumerate(text.tolist()):
            if token >= rope.FIRST_NEEDLE:
                colour, value = divmod(token - rope.FIRST_NEEDLE, rope.VALUES)
                assert colour not in needles
                needles[colour] = value
            elif rope.LETTERS <= token < rope.FIRST_VALUE:
                assert int(text[at + 1]) == rope.FIRST_VALUE + needles[token - rope.LETTERS]
                assert float(weights[at]) == 1
                continue
            assert float(weights[at]) < 1
        assert 1 < len(needles) <= rope.BOUND


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_question_has_its_needle_once_at_its_depth(lab, depth):
    rope = lab.smoother_rope
    text, answers = rope.questions(512, depth, 3, 6)
    for row, answer in zip(text, answers, strict=True):
        first = rope.FIRST_NEEDLE + rope.VALUES * (int(row[-1]) - rope.LETTERS)
        places = ((row >= first) & (row < first + rope.VALUES)).nonzero().flatten()
        assert len(places) == 1 and int(row[places[0]]) == first + int(answer)
        assert abs(int(places[0]) / 512 - depth) < 0.02 and int((row >= rope.FIRST_NEEDLE).sum()) == 4


def test_arms_have_the_frequencies_of_their_names_and_begin_with_the_same_weights(lab, tmp_path, monkeypatch):
    rope = lab.smoother_rope
    from unfreeze import models

    tables = {arm: models.shape(rope.config(arm)).rope for arm in rope.ARMS}
    own = torch.tensor(tables["none"].inverse_frequency)
    ratio = {arm: torch.tensor(of.inverse_frequency) / own for arm, of in tables.items()}
    assert torch.allclose(ratio["linear"], torch.tensor(0.25))
    for arm in ("ntk", "yarn"):
        assert ratio[arm][0] == pytest.approx(1) and ratio[arm][-1] == pytest.approx(0.25)

    monkeypatch.setattr(rope, "LENGTHS", (32, 64))
    first, again = (rope.base(0, tmp_path, 1).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    value, more = rope.study("yarn", 0, 1, 0, tmp_path, count=4)
    assert value == more["right_64"] and len([name for name in more if name[0].isdigit()]) == 10


# additivity


def test_embeddings_that_add_have_every_analogy_and_drawn_ones_have_chance(lab):
    add = lab.additivity
    drawn = torch.Generator().manual_seed(0)
    asked = add.held_out(0)
    assert asked.sum() == add.WORDS // 4 and (asked.sum(1) == add.FORMS // 4).all()
    rows = torch.randn(add.VOCABULARY, 64, generator=drawn)
    value, more = add.measured(rows, asked)
    assert value < 0.1 and more["composed"] < 0.2 and more["rival"] < 0
    rows[: add.WORDS] = add.phrases(rows)
    value, more = add.measured(rows, asked)
    assert value == 1 and more["composed"] == 1 and more["rival"] > 0


def test_the_auxiliary_loss_never_touches_words_that_are_held_out(lab):
    add = lab.additivity
    taught_N = (~add.held_out(0)).flatten().nonzero().squeeze(1)
    rows = torch.randn(add.VOCABULARY, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for arm in ("squared", "contrast", "shuffled"):
        (g,) = torch.autograd.grad(add.auxiliary(arm, rows, taught_N, taught_N.flip(0)), [rows])
        norms = g[: add.WORDS].norm(dim=1)
        assert (norms[taught_N] > 0).all() and norms[add.held_out(0).flatten()].max() == 0


# result.json


def test_a_script_writes_its_result(lab, tmp_path):
    model = lab.studying.fresh(0)
    lab.studying.write(tmp_path, 1.5, {"a": 2.0}, model=model, tokens=10, curve=[[1, 2.0]])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["value"] == 1.5 and result["more"] == {"a": 2.0} and result["curve"] == [[1, 2.0]]
    assert result["active"] == sum(p.numel() for p in model.parameters()) and result["flops"] > 0
