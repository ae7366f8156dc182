"""`unfreeze lab`: arms by seeds, resumed and refused; budgets; the answer's intervals against scipy."""

import json
import runpy
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from unfreeze import cli
from unfreeze.commands import lab, lab_answer, lab_cost
from unfreeze.commands.lab_answer import Difference, difference, over_rows, over_seeds, ranking, sentence
from unfreeze.commands.lab_cost import Cost, cost_of, equal_steps
from unfreeze.config.lab import read_lab
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.evaluate.by_row import ByRow

QUIET = Common(quiet=True)

# --- the answer


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 299, 100_000])
def test_students_t_is_scipys(degrees):
    assert lab_answer.t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


@pytest.mark.parametrize("seeds", [3, 5, 12])
def test_the_interval_over_seeds_is_scipys_paired_one(seeds):
    draw = np.random.default_rng(seeds)
    first, other = draw.normal(2, 0.3, seeds), draw.normal(2.1, 0.3, seeds)
    oracle = stats.ttest_rel(other, first).confidence_interval(0.95)
    gap = over_seeds((other - first).tolist())
    assert (gap.low, gap.high) == pytest.approx((oracle.low, oracle.high), rel=1e-9)


def test_the_interval_over_rows_is_that_of_a_runs_own_changes():
    draw = np.random.default_rng(0)
    counts_R = draw.integers(1, 40, 50).astype(np.float32)
    sums_2R = draw.normal(2, 1, (2, 50)).astype(np.float32) * counts_R
    first, other = (ByRow({"loss": (sums_R, counts_R)}) for sums_R in sums_2R)
    change, error = other.change(first, "loss") or (0.0, None)
    gap = over_rows(*([[sums_R.tolist(), counts_R.tolist()]] for sums_R in sums_2R))
    assert gap is not None and error is not None
    assert gap.mean == pytest.approx(change)
    assert gap.high - gap.mean == pytest.approx(stats.t.ppf(0.975, 49) * error)


def test_other_rows_in_each_seed_are_independent():
    draw = np.random.default_rng(1)
    runs = [[[draw.normal(2, 1, rows).tolist(), [1.0] * rows] for rows in (40, 41, 42)] for _ in range(2)]
    gap = over_rows(*runs)
    gaps = [np.subtract(other[0], one[0]) for one, other in zip(*runs, strict=True)]
    error = np.sqrt(sum(each.var(ddof=1) / len(each) for each in gaps)) / 3
    assert gap is not None and gap.mean == pytest.approx(np.mean([each.mean() for each in gaps]))
    assert gap.high - gap.mean == pytest.approx(stats.t.ppf(0.975, 120) * error)
    assert over_rows(runs[0], [*runs[1][:2], [[1.0], [2.0]]]) is None  # arms with other rows


def simulated(effect, draw, seeds=3, together=1.0):
    """Notes of two arms: values of a seed go up and down together."""
    of_seed = draw.normal(0, together, seeds)
    first, other = (2 + shift + of_seed + draw.normal(0, 0.02, seeds) for shift in (0.0, effect))
    return [[{"value": float(value)} for value in values] for values in (first, other)]


def share_of_clear(effect, studies=400):
    draw = np.random.default_rng(1)
    gaps = [difference(*simulated(effect, draw)) for _ in range(studies)]
    return sum(gap.clear for gap in gaps if gap) / studies


def test_equal_arms_do_not_differ_in_nine_of_ten_studies():
    assert share_of_clear(0.0) <= 0.1


def test_control_a_normal_quantile_finds_differences_that_are_not_there(monkeypatch):
    monkeypatch.setattr(lab_answer, "t_quantile", lambda degrees: 1.96)
    assert share_of_clear(0.0) > 0.1


def test_an_arm_that_is_better_comes_out():
    assert share_of_clear(-0.2) >= 0.95


def test_control_without_pairs_of_seeds_it_does_not():
    draw = np.random.default_rng(1)
    clear = 0
    for _ in range(100):
        first, other = simulated(-0.2, draw)
        gap = difference(first, [*other[1:], other[0]])  # another seed's value
        clear += bool(gap and gap.clear)
    assert clear < 50


def test_an_interval_covers_seeds_and_rows():
    counts = [1.0] * 4
    first = [{"value": 2.0, "rows": [[2.0, 2.0, 2.0, 2.0], counts]}] * 3
    other = [{"value": 1.9, "rows": [[0.0, 3.6, 2.0, 2.0], counts]}] * 3  # one row decides
    gap = difference(first, other)
    assert gap is not None and gap.by == "seeds and rows" and not gap.clear
    alone = difference(*([{**note, "rows": None} for note in notes] for notes in (first, other)))
    assert alone is not None and alone.by == "seeds" and alone.clear


def clear_by_chance(studies=200, seeds=10, count=64):
    """Share of studies that find a difference between equal arms; rows and seeds have the same noise."""
    draw, clear = np.random.default_rng(3), 0
    for _ in range(studies):
        gap_R = draw.normal(0, 0.1, count)  # the same rows in every seed
        notes = [[], []]
        for of_seed in draw.normal(0, 0.1 / np.sqrt(count) * np.sqrt(seeds), seeds):
            first_R = draw.normal(2, 0.3, count)
            for arm, rows_R in zip(notes, (first_R, first_R + gap_R + of_seed), strict=True):
                arm.append({"value": float(rows_R.mean()), "rows": [rows_R.tolist(), [1.0] * count]})
        gap = difference(*notes)
        clear += bool(gap and gap.clear)
    return clear / studies


def test_other_rows_and_other_seeds_together_seldom_find_a_difference_that_is_not_there():
    assert clear_by_chance() <= 0.075


def test_control_the_wider_of_the_two_intervals_finds_some(monkeypatch):
    monkeypatch.setattr(lab_answer, "together", lambda seeds, rows: 0.0)
    assert clear_by_chance() > 0.075


def test_the_sentence_says_only_what_the_intervals_do():
    gaps = {
        "b": Difference(-0.02, -0.031, -0.012, "seeds"),
        "c": Difference(0.0, -0.1, 0.1, "seeds"),
        "d": None,
    }
    words = sentence(["a", "b", "c", "d"], gaps, 3, unit="nats", equal="flops", failed={"d": 2})
    assert words == (
        "b is lower than a by 0.012 to 0.031 nats; no difference: c minus a is -0.1 to 0.1 nats;"
        " d has no finite value in 2 of 3 seeds at equal FLOPs (3 seeds)"
    )


def test_there_is_no_ranking_where_intervals_overlap():
    gaps = {"b": Difference(-3, -4, -2, ""), "c": Difference(-1, -1.5, -0.5, "")}
    assert ranking(["a", "b", "c"], gaps, "lower") == ["b", "c", "a"]
    assert ranking(["a", "b", "c"], gaps, "higher") == ["a", "c", "b"]
    assert ranking(["a", "b", "c"], {**gaps, "c": Difference(-1, -2.5, -0.5, "")}, "lower") == []
    assert ranking(["a", "b", "c"], {**gaps, "c": Difference(0, -1, 1, "")}, "lower") == []


# --- FLOPs


def shape(more=""):
    words = (
        f"pretrain --tokenizer {TINY_K2} --data x.jsonl --shape.num-hidden-layers 2 --shape.hidden-size 32"
    )
    return f"{words} --shape.num-attention-heads 2 --sequence-length 64 --steps 100 {more}".split()


def test_flops_are_those_that_torch_counts_in_another_program():
    """transformers multiplies both halves of attention's square; a causal one needs half of it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from unfreeze.models import from_config
    from unfreeze.models.from_shape import config_of

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": True}
    config = config_of("llama", sizes, {}, vocabulary=500, positions=64)
    oracle = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        oracle(tokens, labels=tokens).loss.backward()
    from unfreeze.parallel.plan.counts import counts

    counted = counts(from_config(config, torch.float32))
    assert counter.get_total_flops() == 64 * 3 * (2 * counted.active + 2 * counted.pairs(64))


def test_the_cost_of_an_arm_is_counted_from_its_command(tmp_path):
    dense = cost_of(shape("--shape.family llama"), "dense")
    assert (dense.tokens_per_step, dense.steps, dense.active) == (4096, 100, dense.total)
    two, four = (
        cost_of(
            shape(
                "--shape.family qwen3_moe --shape.num-experts 8 --shape.moe-intermediate-size 16"
                f" --shape.num-experts-per-tok {k}"
            ),
            "m",
        )
        for k in (2, 4)
    )
    assert two.total == four.total and two.active and four.active and four.per_token and two.per_token
    experts = 2 * 2 * 3 * 32 * 16  # two more experts in each of two layers
    assert four.active - two.active == experts
    assert four.per_token - two.per_token == 6 * experts


def test_steps_make_the_flops_equal():
    costs = {name: Cost(per, 1, 1, 10, None) for name, per in {"a": 3.0, "b": 6.0, "c": 4.0}.items()}
    assert equal_steps(costs, 100) == {"a": 100, "b": 50, "c": 75}
    with pytest.raises(ConfigError, match="arm 'd': FLOPs are counted for pretrain and sft only"):
        equal_steps({**costs, "d": Cost(None, None, None, 10, 5)}, 100)


def test_arms_of_other_budgets_are_refused():
    with pytest.raises(ConfigError, match="arm 'b' has 120 active parameters, 'a' 100: more than 5% apart"):
        lab_cost.refuse_unequal("active parameters", {"a": 100, "b": 120})
    lab_cost.refuse_unequal("active parameters", {"a": 100, "b": 104})


# --- studies of a script

SCRIPT = """
import json, os, pathlib, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed, shift = int(words["--seed"]), float(words["--shift"])
rate = float(words.get("--learning-rate", 1))
with open("{log}", "a") as log:
    log.write(" ".join(sys.argv[1:-2]) + "\\n")
time.sleep(float(words.get("--sleep", 0)))
result = {{"value": 2 + shift + 0.5 * seed + 0.001 * (seed % 2) * shift + abs(rate - 1), "flops": 1e9 * float(words.get("--cost", 1))}}
result["curve"] = [[1, 3.0], [2, result["value"]]]
result["more"] = {{"bytes": 100 + seed}}
result |= json.loads(words.get("--more", "{{}}"))
pathlib.Path(words["--out"], "result.json").write_text(json.dumps(result))
"""
TOML = """
question = "Does a <b>shift</b> help?"
out = "{out}"
python = "{script}"
seeds = 3
value = "score"

[[arms]]
name = "plain"
flags = "--shift 0"

[[arms]]
name = "shifted"
flags = "--shift -0.3"
"""


def beside(words, quiet):
    """Launch a script in this process, with its words, its folder and no module of its own left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in words[1:]])
        patch.syspath_prepend(Path(words[1]).parent)
        before = {*sys.modules}
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as end:
            return end.code, {}
        finally:
            for name in {*sys.modules} - before:
                del sys.modules[name]
    return 0, {}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Its scripts run in this process; `processes` takes that back."""
    monkeypatch.setattr(lab.main, "__defaults__", (beside,))
    (tmp_path / "run.py").write_text(SCRIPT.format(log=tmp_path / "log"))
    path = tmp_path / "study.toml"
    path.write_text(TOML.format(out=tmp_path / "out", script=tmp_path / "run.py"))
    return path


@pytest.fixture
def processes(study, monkeypatch):
    monkeypatch.setattr(lab.main, "__defaults__", (lab.launch,))


def changed(study, *pairs):
    text = study.read_text()
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after, 1)
    study.write_text(text)


def ran(study):
    log = study.with_name("log")
    return log.read_text().splitlines() if log.exists() else []


def test_a_study_of_a_script(processes, study, tmp_path):
    result = lab.main([str(study), "--results", str(tmp_path / "results")], QUIET)
    assert result["sentence"].startswith("shifted is lower than plain by 0.3 to 0.301 at equal FLOPs")
    assert result["sentence"].endswith("at equal FLOPs (3 seeds)") and result["ranking"] == [
        "shifted",
        "plain",
    ]
    assert [line.split()[-1] for line in ran(study)] == ["0", "0", "1", "1", "2", "2"]  # seed by seed
    assert result["head"][-1] == "bytes" and result["rows"][0][-1].startswith("101 (")
    again = json.loads((tmp_path / "results" / "study.json").read_text())
    assert again["sentence"] == result["sentence"] and again["date"] and "CPUs" in again["machine"]
    page = (tmp_path / "out" / "lab.html").read_text()
    assert "Does a &lt;b&gt;shift&lt;/b&gt; help?" in page and "<b>shift" not in page
    assert result["sentence"] in page and page.count("<svg") == 2 and "--shift -0.3 --seed 2" in page
    lab.main([str(study)], QUIET)
    assert len(ran(study)) == 6


def test_more_seeds_keep_the_runs_that_are_there(study):
    lab.main([str(study)], QUIET)
    changed(study, ("seeds = 3", "seeds = 4"))
    lab.main([str(study)], QUIET)
    assert [line.split()[-1] for line in ran(study)[6:]] == ["3", "3"]


def test_a_module_that_a_script_imports_is_part_of_its_arms(study, tmp_path):
    (tmp_path / "shared.py").write_text("A = 1\n")
    (tmp_path / "run.py").write_text("import shared\n" + SCRIPT.format(log=tmp_path / "log"))
    lab.main([str(study)], QUIET)
    (tmp_path / "unrelated.py").write_text("A = 2\n")
    lab.main([str(study)], QUIET)  # control: another file of the folder is not
    (tmp_path / "shared.py").write_text("A = 2\n")
    with pytest.raises(ConfigError, match="arm 'plain'"):
        lab.main([str(study)], QUIET)
    assert len(ran(study)) == 6


def test_an_arm_that_changed_is_refused_by_name(study, tmp_path):
    lab.main([str(study)], QUIET)
    changed(study, ("--shift -0.3", "--shift -0.2"))
    with pytest.raises(ConfigError, match="arm 'shifted': shifted/seed-0 was made by other words"):
        lab.main([str(study)], QUIET)
    changed(study, ("--shift -0.2", "--shift -0.3"))
    with (tmp_path / "run.py").open("a") as script:
        script.write("# another\n")
    with pytest.raises(ConfigError, match="arm 'plain'"):
        lab.main([str(study)], QUIET)
    assert len(ran(study)) == 6


def test_rates_are_tried_on_a_seed_of_their_own(study):
    changed(study, ("question", "learning_rates = [0.5, 1, 2]\nquestion"))
    result = lab.main([str(study)], QUIET)
    lines = ran(study)
    assert len(lines) == 6 + 6 and all("--seed 1000" in line for line in lines[:6])
    assert all("--learning-rate 1 " in line and "--seed 1000" not in line for line in lines[6:])
    assert [row[result["head"].index("rate")] for row in result["rows"]] == ["1", "1"]
    assert "FLOPs of tries" in result["head"]
    assert not any("lowest or highest one tried" in words for words in result["cautions"])


def test_seeds_that_change_nothing_are_said(study):
    changed(study, ("--shift 0", """--shift 0 --more '{\\"value\\": 2}'"""))
    changed(study, ("--shift -0.3", """--shift -0.3 --more '{\\"value\\": 1}'"""))
    cautions = lab.main([str(study)], QUIET)["cautions"]
    assert any("All seeds of plain, shifted have one value" in words for words in cautions)


def test_other_rows_in_an_arm_are_said(study):
    changed(study, ("--shift 0", """--shift 0 --more '{\\"rows\\": [2, 2]}'"""))
    changed(study, ("--shift -0.3", """--shift -0.3 --more '{\\"rows\\": [1, 1, 1]}'"""))
    cautions = lab.main([str(study)], QUIET)["cautions"]
    assert "Arms have other held-out rows, so an interval covers seeds alone." in cautions
    assert not any("All seeds of" in words for words in cautions)


def test_a_curve_of_another_measure_has_its_own_name_and_x(study, tmp_path):
    points = """--more '{\\"curve\\": [[-3, 2.5], [-1, 2.0]]}'"""
    changed(study, ("--shift 0", f"--shift 0 {points}"), ("--shift -0.3", f"--shift -0.3 {points}"))
    lab.main([str(study)], QUIET)
    page = (tmp_path / "out" / "lab.html").read_text()
    assert "Across: step." in page and "<strong>score</strong>" in page  # never FLOPs below 0
    changed(study, ("question", 'curve = "loss"\nacross = "log10 of the rate"\nquestion'))
    lab.main([str(study)], QUIET)
    page = (tmp_path / "out" / "lab.html").read_text()
    assert "Across: log10 of the rate." in page and "<strong>score</strong>" not in page


def test_a_curve_from_step_0_alone_has_no_flops(study):
    points = """--more '{\\"curve\\": [[-1, 2.5], [0, 2.0]]}'"""
    changed(study, ("--shift 0", f"--shift 0 {points}"), ("--shift -0.3", f"--shift -0.3 {points}"))
    assert lab.main([str(study)], QUIET)["finished"]


def test_a_rate_at_the_end_of_those_tried_is_said(study):
    changed(study, ("question", "learning_rates = [1, 2]\nquestion"))
    result = lab.main([str(study)], QUIET)
    assert any(
        "best rate of plain, shifted is the lowest or highest" in words for words in result["cautions"]
    )


def test_a_run_that_diverged_is_counted_not_compared(study):
    changed(study, ("--shift -0.3", """--shift -0.3 --more '{\\"value\\": null}'"""))
    result = lab.main([str(study)], QUIET)
    assert result["sentence"] == "shifted has no finite value in 3 of 3 seeds at equal FLOPs (3 seeds)"
    assert result["rows"][1][1] == "diverged in 3 of 3" and result["ranking"] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cost 2", "arm 'shifted' has 2,000,000,000 FLOPs, 'plain' 1,000,000,000"),
        ("""--more '{\\"flops\\": null}'""", "arm 'shifted': its FLOPs are not counted"),
        ("""--more '{\\"value\\": \\"x\\"}'""", "shifted/seed-0: result.json has value 'x'"),
        ("""--more '{\\"rows\\": [true]}'""", r"result.json has rows \[True\]"),
        ("""--more '{\\"curve\\": [[1]]}'""", "result.json has curve"),
        ("""--more '{\\"more\\": {\\"a\\": \\"b\\"}}'""", "result.json has more"),
        ("""--more '{\\"flops\\": NaN}'""", "result.json has flops nan"),
        ("""--more '{\\"active\\": -1}'""", "result.json has active -1"),
        ("""--more '{\\"rows\\": [1, NaN]}'""", r"result.json has rows \[1, nan\]"),
        ("""--more '{\\"curve\\": [[NaN, 1]]}'""", "result.json has curve"),
        (f"""--more '{{\\"value\\": 1{"0" * 400}}}'""", "result.json has value 1000"),
    ],
)
def test_results_that_cannot_be_compared_are_refused_after_one_run(study, flags, words):
    changed(study, ("--shift -0.3", f"--shift -0.3 {flags}"))
    with pytest.raises(ConfigError, match=words):
        lab.main([str(study)], QUIET)
    assert len(ran(study)) == 2


def test_a_seed_that_costs_more_is_refused(study):
    script = study.with_name("run.py")
    dear = "result['flops'] *= 1 + 3 * (shift != 0 and seed == 1)\npathlib"
    script.write_text(script.read_text().replace("pathlib.Path", dear + ".Path"))
    with pytest.raises(ConfigError, match="arm 'shifted' has 4,000,000,000 FLOPs, 'plain' 1,000,000,000"):
        lab.main([str(study)], QUIET)


@pytest.mark.parametrize("equal", ["flops", "none"])
def test_runs_of_no_flops_are_compared_too(study, equal):
    changed(study, ("--shift 0", "--shift 0 --cost 0"), ("--shift -0.3", "--shift -0.3 --cost 0"))
    changed(study, ("question", f'equal = "{equal}"\nquestion'))
    assert lab.main([str(study)], QUIET)["sentence"].startswith("shifted is lower")


def test_a_script_that_fails_is_named_and_the_rest_goes_on_later(processes, study):
    script = study.with_name("run.py")
    whole = script.read_text()
    changed(study, ("--shift -0.3", "--shift -0.3 --fail 1"))
    script.write_text(
        whole + "\nif '--fail' in sys.argv and not os.path.exists('" + str(study) + ".ok'): sys.exit(3)"
    )
    with pytest.raises(ConfigError, match=r"shifted/seed-0 failed \(exit code 3\)"):
        lab.main([str(study)], QUIET)
    study.with_name("study.toml.ok").write_text("")
    lab.main([str(study)], QUIET)
    assert len(ran(study)) == 7


def test_a_word_may_be_longer_than_a_files_name(study):
    changed(study, ("--shift -0.3", f"--shift -0.3 --about {'x' * 5000}"))
    assert lab.main([str(study)], QUIET)["finished"]


def test_a_script_may_print_any_bytes(processes, study):
    script = study.with_name("run.py")
    script.write_text(script.read_text() + "\nsys.stdout.buffer.write(bytes(range(256)) * 300)")
    assert lab.main([str(study)], QUIET)["finished"]


def test_a_kill_at_any_moment_loses_at_most_one_run(study, forkserver):
    changed(study, ("--shift 0", "--shift 0 --sleep 0.2"))
    command = "import sys; from unfreeze import cli; sys.exit(cli.main(sys.argv[1:]))"
    for _ in range(2):
        child = forkserver.start(["-c", command, "lab", study, "--quiet"])
        before = len(ran(study))
        until = time.monotonic() + 60
        while len(ran(study)) < before + 2 and time.monotonic() < until and child.poll() is None:
            time.sleep(0.02)
        if child.poll() is None:
            child.kill()  # its own child goes with it
        child.wait()
        json.loads((study.parent / "out" / "lab.json").read_text())
    result = lab.main([str(study)], QUIET)
    assert result["finished"] and result["sentence"].startswith("shifted is lower")
    assert 6 <= len(ran(study)) <= 6 + 2
    notes = json.loads((study.parent / "out" / "lab.json").read_text())["runs"]
    assert all(note["finished"] for note in notes.values()) and len(notes) == 6


def test_ctrl_c_names_the_command_that_goes_on(study):
    def stopped(words, quiet):
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match="in plain/seed-0; to continue, the same command: unfreeze lab"
    ):
        lab.main([str(study)], QUIET, launch=stopped)
    assert lab.main([str(study)], QUIET)["finished"]


def test_data_is_prepared_once(study, tmp_path):
    make = tmp_path / "make.py"
    make.write_text("import sys; open(sys.argv[1], 'a').write('x')")
    lines = f'prepare = "python {make} {tmp_path / "made"}"\nmakes = "{tmp_path / "made"}"\nquestion'
    changed(study, ("question", lines))
    with pytest.raises(ConfigError, match="the data is not made yet"):
        lab.main([str(study), "--dry-run"], QUIET)
    for _ in range(2):
        lab.main([str(study)], QUIET)
    assert (tmp_path / "made").read_text() == "x"


def test_dry_run_and_list_know_what_was_removed_or_changed(study, tmp_path):
    lab.main([str(study)], QUIET)
    shutil.rmtree(tmp_path / "out" / "shifted" / "seed-1")
    runs = lab.main([str(study), "--dry-run"], QUIET)["runs"]
    assert [run["name"] for run in runs if not run["done"]] == ["shifted/seed-1"]
    listed = lab.main([str(study), "--list"], QUIET)["runs"]
    assert [row["name"] for row in listed if not row["finished"]] == ["shifted/seed-1"]
    changed(study, ("--shift -0.3", "--shift -0.2"))
    with pytest.raises(ConfigError, match="arm 'shifted': shifted/seed-0 was made by other words"):
        lab.main([str(study), "--dry-run"], QUIET)


def test_the_dry_run_names_all_commands_that_make_the_data(study):
    lines = 'prepare = ["python a.py x", "pretrain b.toml"]\nmakes = "gone"\nquestion'
    changed(study, ("question", lines))
    with pytest.raises(ConfigError, match=r"python a\.py x && unfreeze pretrain b\.toml"):
        lab.main([str(study), "--dry-run"], QUIET)


@pytest.mark.parametrize("text", ["{}", '{"runs": []}', '{"runs": {"plain/seed-0": {"finished": true}}}'])
@pytest.mark.parametrize("flags", [[], ["--list"], ["--dry-run"]])
def test_a_ledger_of_something_else_is_refused(study, tmp_path, text, flags):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lab.json").write_text(text)
    with pytest.raises(ConfigError, match=r"lab\.json is no ledger of a study"):
        lab.main([str(study), *flags], QUIET)


def test_two_studies_in_one_folder_are_refused(study, tmp_path):
    def meanwhile(words, quiet):
        with pytest.raises(ConfigError, match=f"another process works in {tmp_path / 'out'}"):
            lab.main([str(study)], QUIET)
        assert lab.main([str(study), "--list"], QUIET)["runs"]
        return lab.launch(words, quiet)

    assert lab.main([str(study)], QUIET, launch=meanwhile)["finished"]


def test_dry_run_and_list_run_nothing(study, capsys):
    lab.main([str(study), "--dry-run"], Common())
    printed = capsys.readouterr().out
    assert "shifted/seed-2" in printed and "6 of 6 runs are left, time unknown" in printed and not ran(study)
    lab.main([str(study)], QUIET)
    result = lab.main([str(study), "--list"], Common())
    assert "plain/seed-0             finished" in capsys.readouterr().out
    assert len(result["runs"]) == 6 and all(len(row["key"]) == 32 for row in result["runs"])
    assert lab.main([str(study), "--dry-run"], QUIET)["seconds"] == 0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("seeds = 3", "seeds = 1", "seeds is 1: fewer than 3 runs"),
        ('"shifted"', '"plain"', "two arms are called 'plain'"),
        ("--shift -0.3", "--shift 0", "arms 'plain' and 'shifted' do not differ"),
        ("run.py", "gone.py", "arm 'plain': there is no file .*gone.py"),
        ("--shift 0", "--shift 0 --seed 3", "arm 'plain' has --seed, which the study gives"),
        ("seeds = 3", "seeds = 1.0", "seeds: "),
        ("seeds = 3", 'seeds = "1"', "seeds: "),
        ('flags = "--shift 0"', 'run = "python"', "arm 'plain' has no command: 'python'"),
        ("question", 'makes = "x"\nprepare = "python \'x"\nquestion', "prepare.*No closing quotation"),
        ("question", 'makes = "x"\nprepare = " "\nquestion', "prepare has a command without words"),
        ("question", "learning_rates = [1, 1.0000001]\nquestion", "has 1 different rates of 2"),
        ("--shift 0", "--shift 0 --out=x", "arm 'plain' has --out=x"),
        ("question", "learning_rates = [1]\nquestion", "learning_rates has 1 different rates of 1"),
        ("question", "tuning_steps = 5\nquestion", "tuning_steps has no effect"),
        ("question", 'prepare = "python x.py"\nquestion', "prepare and makes go together"),
        ("question", 'run = "pretrain x.toml"\nquestion', "needs either run or python"),
        ("seeds = 3", "seed = 3", "there is no field seed.*'seeds'"),
        ("flags = ", "flag = ", r"there is no field arms\.1\.flag.*'flags'"),
        ("question", 'equal = "steps"\nquestion', "equal: "),
    ],
)
def test_bad_studies_are_refused_before_the_first_run(study, before, after, words):
    changed(study, (before, after))
    with pytest.raises(ConfigError, match=words):
        lab.main([str(study)], QUIET)
    assert not ran(study)


# --- studies of a command


@pytest.fixture
def pretraining(tmp_path):
    """A study of a model of one layer, in this process."""
    rows = [{"text": f"the {a} and the {b} went over the {c}"} for a in "abcd" for b in "efgh" for c in "ijk"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = f"pretrain --tokenizer {TINY_K2} --data {tmp_path / 'rows.jsonl'} --validation-fraction 0.2"
    base += (
        " --shape.family llama --shape.num-hidden-layers 1 --shape.num-attention-heads 2 --sequence-length 32"
    )
    base += " --tokens-per-step 256 --threads 1 --dtype float32 --watch.samples 0 --watch.validate-every 6"
    lines = [f'question = "Is wider better?"\nout = "{tmp_path / "out"}"\nrun = "{base} --steps 12"']
    lines += [
        f'[[arms]]\nname = "{name}"\nflags = "--shape.hidden-size {n}"'
        for name, n in (("narrow", 16), ("wide", 32))
    ]
    path = tmp_path / "study.toml"
    path.write_text("\n".join(lines))
    return path


def here(words, quiet):
    """Launch in this process."""
    return cli.main([*words, "--json", "--quiet"]), {}


def test_a_small_study_of_pretraining(pretraining, tmp_path, capsys):
    result = lab.main([str(pretraining)], QUIET, launch=here)
    notes = json.loads((tmp_path / "out" / "lab.json").read_text())["runs"]
    assert len(notes) == 6 and all(note["finished"] for note in notes.values())
    narrow, wide = notes["narrow/seed-0"], notes["wide/seed-0"]
    assert narrow["steps"] == 12 and wide["steps"] == 5  # a weight of the head counts as any other
    assert wide["flops"] == pytest.approx(narrow["flops"], rel=0.1)
    assert len(narrow["rows"][0]) == len(wide["rows"][0]) >= 2
    assert sum(narrow["rows"][0]) / sum(narrow["rows"][1]) == pytest.approx(narrow["value"], rel=1e-5)
    assert [step for step, _ in narrow["curve"]] == [0, 6, 12]
    assert not (tmp_path / "out" / "narrow" / "seed-0" / "state").exists()
    assert narrow["value"] != notes["narrow/seed-1"]["value"]
    assert "at equal FLOPs (3 seeds)" in result["sentence"] and result["head"][:2] == ["arm", "loss, nats"]
    assert any("widened to cover other held-out rows" in words for words in result["cautions"])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("pretrain", "pretrian", "arm 'narrow': 'pretrian' is no command of a study.*'pretrain'"),
        ("--steps 12", "", "arm 'narrow' has no steps"),
        (
            "--shape.hidden-size 32",
            "--shape.hidden-size 32 --steps 9",
            "arm 'wide' has --steps, but equal = flops",
        ),
        ("question", 'equal = "active"\nquestion', "arm 'wide' has .* active parameters, 'narrow'"),
        ("question", 'value = "los"\nquestion', "no validation of narrow/seed-0 has a value 'los'.*'loss'"),
        ("--validation-fraction 0.2", "--watch.validate-every 0", "narrow/seed-0 has no validation"),
    ],
)
def test_bad_studies_of_a_command_are_refused(pretraining, before, after, words, capsys):
    changed(pretraining, (before, after))
    if "validate-every 0" in after:
        changed(pretraining, (" --watch.validate-every 6", ""))
    with pytest.raises(ConfigError, match=words):
        lab.main([str(pretraining)], QUIET, launch=here)
    capsys.readouterr()


def test_equal_active_parameters_need_equal_tokens(pretraining, capsys):
    changed(pretraining, ("--shape.hidden-size 32", "--shape.hidden-size 16 --steps 24"))
    changed(pretraining, ("question", 'equal = "active"\nquestion'))
    words = "arm 'wide' has 6,144 training tokens, 'narrow' 3,072: more than 5% apart"
    with pytest.raises(ConfigError, match=words):
        lab.main([str(pretraining)], QUIET, launch=here)
    capsys.readouterr()


def test_the_studies_of_the_examples_can_be_read():
    files = [file for file in Path("examples/lab").glob("*.toml") if "question" in file.read_text()]
    assert files
    for file in files:
        assert read_lab(file).question.endswith("?")
