"""examples/lab: every study is read, has its runs and refuses one seed; and what is special in some of them.

The studies themselves take minutes (make studies). Their measures are held against torch, numpy and counts.
"""

import importlib.util
import json
import math
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.commands import lab
from unfreeze.commands.lab_runs import main_runs, tuning_runs
from unfreeze.config.lab import read_lab
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.models.factory import from_config
from unfreeze.models.init import initialize

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "lab"
STUDIES = sorted(file.stem for file in FOLDER.glob("*.toml") if "question" in file.read_text())
SCRIPTED = [name for name in STUDIES if "\npython = " in (FOLDER / f"{name}.toml").read_text()]
ON_TEXTS = ("balancing", "sampled_experts")


@pytest.fixture
def script(monkeypatch):
    """Import a script of the folder, which imports its neighbours."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()

    def imported(name):
        spec = importlib.util.spec_from_file_location(f"lab_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield imported
    torch.set_num_threads(threads)
    sys.modules.pop("studying", None)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder from which the studies' paths are right, without what they make."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(name):
    return lab.main([f"examples/lab/{name}.toml", "--dry-run"], Common(json=True, quiet=True))


# --- every study


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_every_arm_with_every_seed(name):
    study = read_lab(FOLDER / f"{name}.toml")
    runs = main_runs(study, {}, {arm.name: None for arm in study.arms})
    names = {f"{arm.name}/seed-{seed}" for arm in study.arms for seed in range(study.seeds)}
    assert {run.name for run in runs} == names and len(runs) == len(names) >= 6 and study.seeds >= 3
    tries = tuning_runs(study, {arm.name: None for arm in study.arms})
    assert len(tries) == len(study.arms) * len(study.learning_rates)
    assert study.question.endswith("?") and all(arm.about for arm in study.arms)
    for run in runs:
        assert run.words[-2:] == ("--seed", str(run.seed))
        if run.by_script:
            assert (ROOT / run.words[1]).is_file()


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_of_one_seed_is_refused(name, tmp_path):
    text = (FOLDER / f"{name}.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("seeds")]
    (tmp_path / "one.toml").write_text("seeds = 1\n" + "\n".join(lines))
    with pytest.raises(ConfigError, match="seeds is 1: fewer than 3"):
        read_lab(tmp_path / "one.toml")
    (tmp_path / "three.toml").write_text("seeds = 3\n" + "\n".join(lines))
    assert read_lab(tmp_path / "three.toml").seeds == 3


@pytest.mark.parametrize("name", SCRIPTED)
def test_the_dry_run_of_scripts_has_their_commands(name, clone):
    study = read_lab(Path(f"examples/lab/{name}.toml"))
    for path in study.makes:  # as if prepare had run
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    result = planned(name)
    assert len(result["runs"]) == len(study.arms) * study.seeds and not result["finished"]
    assert all(run["command"].startswith("python examples/lab/") for run in result["runs"])


@pytest.mark.parametrize("name", ON_TEXTS)
def test_the_arms_of_experts_cost_the_same(name, clone, script, monkeypatch):
    texts = script("texts")
    monkeypatch.setattr(texts, "texts", lambda: ((str(i), f"{i} words of a text " * 8) for i in range(40)))
    texts.make(Path("build/lab/texts"), vocabulary=300)
    result = planned(name)
    assert len(result["runs"]) == 12 and len({run["flops"] for run in result["runs"]}) == 1
    assert all(" --steps 180 --seed " in run["command"] for run in result["runs"])


def test_the_arms_of_curricula_differ_in_their_prompts_alone(clone, script, monkeypatch):
    words = script("curricula")
    monkeypatch.setattr(words, "TEXTS", 10)
    data = Path("build/lab/words")
    words.main(data)
    shutil.copytree(data / "model", data / "taught" / "model")  # in place of the warm-up: random weights
    config = json.loads((data / "model" / "config.json").read_text())
    model = from_config(config, torch.float32, "cpu")
    initialize(model, 0)
    save_file(dict(model.state_dict()), data / "taught" / "model" / "model.safetensors")
    runs = planned("curricula")["runs"]
    assert len(runs) == 12
    (seen,) = {
        re.sub(r" --data \S+| --curriculum \w+| --out \S+| --seed \d", "", run["command"]) for run in runs
    }
    assert seen.startswith("unfreeze grpo ")
    # curricula know a prompt from the pass before: in a single pass all of them are the same run
    steps, prompts = (int(re.search(rf"--{flag} (\d+)", seen)[1]) for flag in ("steps", "prompts-per-step"))
    assert steps * prompts >= 3 * len((data / "prompts.jsonl").read_text().splitlines())


# --- norms


def test_tolerance_is_the_width_between_the_crossings_of_the_bar(script):
    norms = script("norms")
    rates = np.array([1e-3, 1e-2, 1e-1, 1.0])
    losses = [3.0, 2.0, 2.5, 5.0]
    wide, cut = norms.tolerance(rates, losses, 2.8)
    left = np.interp(2.8, [2.0, 3.0], [-2, -3])  # numpy's own line
    right = np.interp(2.8, [2.5, 5.0], [-1, 0])
    assert wide == pytest.approx(right - left, abs=1e-12) and cut == 0


def test_tolerance_stops_at_a_gap_and_is_cut_where_the_rates_end(script):
    norms = script("norms")
    rates = (1e-4, 1e-3, 1e-2, 1e-1)
    assert norms.tolerance(rates, [3.0, 3.0, 3.0, 3.0], 2.8) == (0.0, 0)
    assert norms.tolerance(rates, [2.0, 2.0, 2.0, 2.0], 2.8) == (pytest.approx(3), 2)
    with_gap, cut = norms.tolerance(rates, [2.7, 3.0, 2.0, 3.0], 2.8)
    assert with_gap == pytest.approx(1.6) and cut == 0  # 0.8 of a decade on each side of 1e-2


def test_the_bar_lies_between_frequencies_and_pairs(script):
    norms, draw = script("norms"), random.Random(0)
    # bytes 0 and 1 in turn, now and then repeated: ln 2 for one byte alone, much less for pairs
    text = [0]
    for _ in range(20_000):
        text.append(text[-1] if draw.random() < 0.1 else 1 - text[-1])
    bytes_T = torch.tensor(text)
    pairs = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert norms.bar(bytes_T, bytes_T) == pytest.approx((math.log(2) + pairs) / 2, abs=0.02)


def test_every_norm_takes_part_and_a_run_that_diverges_counts_as_the_start(script, monkeypatch):
    norms = script("norms")
    train, held_out = norms.texts()
    names = {
        arm: {name for name, _ in norms.normed(arm, 0, layers=2).named_parameters()} for arm in norms.ARMS
    }
    assert names["qk_norm"] - names["pre_norm"] and names["sandwich_norm"] - names["pre_norm"]
    assert norms.loss_after("pre_norm", 0, 3e-3, 2, train, held_out) < norms.START

    def diverging(*_):
        raise norms.NonFinite("loss is nan")

    monkeypatch.setattr(norms, "fit", diverging)
    assert norms.loss_after("pre_norm", 0, 3e-3, 2, train, held_out) == norms.START


# --- annealing


@pytest.mark.parametrize(("arm", "first", "times"), [("restarts", 95, 1), ("doubling", 54, 2)])
def test_restarts_are_those_of_torch(arm, first, times, script):
    annealing = script("annealing")
    steps = 400 if arm == "restarts" else 397  # without the warm-up 380 = 4 · 95 and 378 = 7 · 54
    warm = max(1, steps // 20)
    assert steps - warm == sum(annealing.CYCLES[arm]) * first
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=annealing.PEAK)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first, times)
    for step in range(warm, steps):
        assert annealing.rate(arm, step, steps) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_all_arms_of_annealing_have_one_peak_and_one_warm_up(script):
    annealing = script("annealing")
    for arm in annealing.ARMS:
        rates = [annealing.rate(arm, step, 400) for step in range(400)]
        assert max(rates) == pytest.approx(annealing.PEAK) and min(rates) >= 0, arm
        assert rates[0] < annealing.PEAK / 10, arm
    last = {arm: annealing.rate(arm, 399, 400) / annealing.PEAK for arm in annealing.ARMS}
    assert last["constant"] == last["averaged"] == 1
    assert all(share < 0.2 for arm, share in last.items() if arm not in ("constant", "averaged"))


def test_the_step_of_annealing_is_chosen_on_other_rows_than_it_reports(script, monkeypatch):
    annealing = script("annealing")
    monkeypatch.setattr(annealing, "EVERY", 2)
    measured = iter([[1.0, 9.0, 1.0, 9.0], [3.0, 1.0, 3.0, 1.0], [2.0, 5.0, 2.0, 5.0]])
    with monkeypatch.context() as patched:
        patched.setattr(annealing, "held_out_loss", lambda model, rows_RL: next(measured))
        rows, more, curve = annealing.study("restarts", 0, steps=6, rows=4)
    assert curve == [[2, 1.0], [4, 3.0], [6, 2.0]] and more["best_step"] == 2
    assert rows == [9.0, 9.0] and more["last"] == 5 and more["gap"] == -4
    _, averaged, _ = annealing.study("averaged", 0, steps=6, rows=4)
    _, constant, _ = annealing.study("constant", 0, steps=6, rows=4)
    # the same training, measured at other weights
    assert averaged["train"] == constant["train"] and averaged["last"] != constant["last"]


# --- MoBA in place of full attention


@pytest.fixture
def moba(script, monkeypatch):
    module = script("moba_from_full")
    for name, value in {"LENGTH": 32, "DOCUMENTS": 2, "BLOCK": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_a_swap_costs_nothing_where_all_blocks_are_chosen(moba, tmp_path, monkeypatch):
    moba.bases(tmp_path, steps=2, seeds=1)
    results = {}
    for chosen in (8, 1):
        monkeypatch.setattr(moba, "CHOSEN", chosen)
        rows, results[chosen], _ = moba.study("moba", 0, tmp_path, steps=5)
        assert len(rows) == 64
    assert results[8]["at once"] == pytest.approx(0, abs=1e-5)
    assert abs(results[1]["at once"]) > 1e-4  # its own block alone
    # a mean key per block of 4, beside keys and values of each token
    _, full, _ = moba.study("full", 0, tmp_path, steps=5)
    assert full["at once"] == 0 and results[1]["cache"] == pytest.approx(full["cache"] * (1 + 1 / 8))


def test_the_bases_of_seeds_differ_and_are_kept_to_the_bit(moba, tmp_path):
    moba.bases(tmp_path / "a", steps=1, seeds=2)
    moba.bases(tmp_path / "b", steps=1, seeds=1)
    first, again = (load_file(tmp_path / folder / "seed-0.safetensors") for folder in "ab")
    other = load_file(tmp_path / "a" / "seed-1.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# --- curricula


@pytest.fixture
def words(script, tmp_path, monkeypatch):
    module = script("curricula")
    monkeypatch.setattr(module, "TEXTS", 4_000)
    module.main(tmp_path)
    rows = lambda name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]  # noqa: E731
    return module, rows


def spelt(text):
    return [text[i : i + 2] for i in range(0, len(text.rstrip("=")), 2)]


def test_prompts_are_of_all_lengths_and_hard_ones_of_the_longest(words):
    module, rows = words
    lengths = [len(spelt(row["prompt"])) for row in rows("prompts")]
    counts = {n: lengths.count(n) for n in {*lengths}}
    assert sorted(counts) == [2, 3, 4, 5, 6, 7, 8] and max(counts.values()) - min(counts.values()) <= 1
    assert {len(spelt(row["prompt"])) for row in rows("hard") + rows("held_out")} == {8}
    trained = {row["prompt"] for name in ("hard", "prompts") for row in rows(name)}
    assert len(rows("hard")) == len(rows("prompts")) and not trained & {
        row["prompt"] for row in rows("held_out")
    }
    for row in rows("prompts")[:50]:
        assert spelt(row["answer"]) == spelt(row["prompt"])[::-1]
        assert module.reward(**row, completion=row["answer"]) == 1
        assert module.reward(**row, completion=row["answer"][2:]) == 0


def test_the_teacher_writes_a_letter_right_as_often_as_he_says(words):
    module, rows = words
    pairs = [
        (a, b)
        for row in rows("texts")
        for a, b in zip(spelt(row["prompt"])[::-1], spelt(row["completion"]), strict=True)
    ]
    assert all(a[1] == b[1] for a, b in pairs)  # places are never wrong
    share = sum(a == b for a, b in pairs) / len(pairs)
    expected = module.RIGHT + (1 - module.RIGHT) / len(module.LETTERS)
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / len(pairs)))
