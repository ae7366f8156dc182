"""Every row of the drill is named, and each by its guard: with the guard taken out (the control arms), the
same fault goes unnamed."""

from __future__ import annotations

import json
import math
import mmap
import re
import shutil
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unfreeze import cli, drill
from unfreeze.checkpoint.faults import Faults
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.packing.batches import Batches
from unfreeze.data.store.dataset import Account
from unfreeze.drill import bills, loading, numbers, processes, runs
from unfreeze.drill.fault import ROWS, Fault, measured, must_refuse, said
from unfreeze.drill.sandbox import Sandbox
from unfreeze.generate.recorded import Recorded
from unfreeze.job.rewarded import Rewarding
from unfreeze.models.blocks.routers import Router
from unfreeze.models.blocks.saved import Saved
from unfreeze.parallel.plan import Plan
from unfreeze.report.rollouts import canaries
from unfreeze.rollout.rollouts import Rollouts
from unfreeze.synth.usage import Usage
from unfreeze.teach.budget import Ceiling
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run

FAULTS = {f"{fault.row} {fault.title}": fault for fault in drill.faults()}
TWINS = {  # of those that start processes and take 5 s or more: nightly, and here a test of the same guard
    "M1 experts without tokens, while processes wait for each other": "parallel/test_collectives.py::test_control_arm_collectives_that_depend_on_routing_hang",
    "R1 kill -9 in the middle of training and saving": "train/test_kill.py::test_unfreeze_sft_killed_often_gives_the_losses_of_the_uninterrupted_run",
    "R3 a run resumed with another number of processes": "parallel/test_collectives.py::test_resume_on_one_then_two_then_one_process",
}


def nightly(names, slow):
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in slow)) for name in names]


def nothing(*arguments, **options):
    """What stands where a guard was taken out."""


# --- one guard taken out at a time; each takes pytest's monkeypatch ---


def expand_on_load(patch):
    real = loading.open_model

    def expanding(*arguments, **options):
        model = real(*arguments, **options)
        for module in list(model.modules()):
            if getattr(module, "codec", None) is not None:
                module.register_buffer("expanded", module.packed.dequantize())
        return model

    patch.setattr(loading, "open_model", expanding)


def router_detached(patch):
    real = Router.weigh
    patch.setattr(Router, "weigh", lambda gate, scores, ids: real(gate, scores, ids).detach())


def leak_each_step(patch):
    real, kept = loading.train_step, []

    def leaking(*arguments, **options):
        # tiny-k2 expanded to float32; mapped anew, or it would come from what a long test process has free
        kept.append(mmap.mmap(-1, 10_000_000))
        kept[-1].write(b"1" * 10_000_000)
        return real(*arguments, **options)

    patch.setattr(loading, "train_step", leaking)


def run_what_lies_there(patch):
    real = loading.load_tokenizer

    def trusting(folder):
        for file in folder.glob("tokenization_*.py"):
            try:
                exec(compile(file.read_text(), str(file), "exec"))
            except SystemExit:
                return None
        return real(folder)

    patch.setattr(loading, "load_tokenizer", trusting)


def replay_left_out(patch):
    patch.setattr("unfreeze.train.fit.investigate", lambda *arguments, **options: "")


def norm_in_half(patch):
    def half(x_TD, weight_D, eps):
        x = x_TD.half()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.tensor(eps).half())

    patch.setattr(numbers, "rms_norm", half)


def each_its_own_mean(patch):
    """A mean per micro-batch, then the mean of means."""
    real = numbers.train_step

    def means(model, optimizer, batches, objective, **options):
        gradients = []
        for batch in batches:
            loss = objective(model.hidden(batch), model.lm_head, batch)
            gradients.append(torch.autograd.grad(loss.sum / loss.count, list(optimizer.parameters.values())))
        real(model, optimizer, batches, objective, **options)
        for parameter, *parts in zip(optimizer.parameters.values(), *gradients, strict=True):
            parameter.grad = sum(parts) / len(parts)

    patch.setattr(numbers, "train_step", means)


def unshifted(patch):
    real = numbers.pack

    def pack(examples):
        batch = real(examples)
        batch.targets_T.copy_(batch.tokens_T)
        return batch

    patch.setattr(numbers, "pack", pack)


def supervise_all(patch):
    real = numbers.encode_file
    patch.setattr(numbers, "encode_file", lambda *a, **options: real(*a, **{**options, "supervise": "all"}))


def trust_the_template(patch):
    patch.setattr("unfreeze.data.tokens.turns._refuse_unstable", nothing)
    patch.setattr("unfreeze.data.tokens.turns.check_words", nothing)


def nobody_looks(patch):
    """An exchange that breaks off says only that a connection closed."""
    patch.setattr("unfreeze.parallel.processes.roll.Roll._look", lambda roll: {})
    patch.setattr("unfreeze.parallel.processes.roll.PATIENCE", 0.1)


def no_vocabulary_check(patch):
    patch.setattr("unfreeze.data.check_vocab", nothing)
    patch.setattr("unfreeze.generate.model.check_vocab", nothing)


def sample_every_row(patch):
    real = numbers.Engine
    patch.setattr(numbers, "Engine", lambda model, tokenizer=None, **options: real(model, **options))


def end_masked(patch):
    """What a collator does that masks every pad token, where pad is the end token."""
    real = numbers.pack

    def pack(examples):
        batch = real(examples)
        batch.weights_T[(batch.targets_T == 1281) | (batch.targets_T == 1282)] = 0
        ends = [batch.targets_T[i] for i in batch.weights_T.nonzero().flatten()]
        assert ends
        return batch

    patch.setattr(numbers, "pack", pack)


def unknown_keys_pass(patch):
    from unfreeze.config import parse as config

    real = config._given

    def known_only(kind, table, where, prefix=""):
        return real(
            kind, {key: value for key, value in table.items() if key in kind.model_fields}, where, prefix
        )

    patch.setattr(config, "_given", known_only)


def last_logits_only(patch):
    real = numbers.cross_entropy

    def last(hidden, head, batch):
        kept = batch.weights_T.nonzero().flatten()
        weights = torch.zeros_like(batch.weights_T).index_fill(0, kept[-1:], 1.0)
        return real(hidden, head, SimpleNamespace(targets_T=batch.targets_T, weights_T=weights))

    patch.setattr(numbers, "cross_entropy", last)


def stale_cache(patch):
    real = Recorded.__call__

    def step(steps, tokens):
        logits = real(steps, tokens)
        for tensors in steps.cache.layers.values():
            tensors[0][:, steps.cache.lengths[0] - 1] *= 0.5
        return logits

    patch.setattr(Recorded, "__call__", step)


def only_reached_experts(patch):
    real = AdamW.gradient

    def reached(optimizer, name):
        gradient = real(optimizer, name)
        return (
            gradient[gradient.flatten(1).any(1)] if gradient is not None and gradient.dim() == 3 else gradient
        )

    patch.setattr(AdamW, "gradient", reached)


def route_again(patch):
    patch.setattr(Saved, "reuse", lambda saved, compute: compute())


def half_saves_count(patch):
    patch.setattr("unfreeze.train.run.SAVE_NAME", re.compile(r"step-(\d{6,}).*"))
    patch.setattr("unfreeze.train.run.shutil", SimpleNamespace(rmtree=nothing))


def rate_as_meant(patch):
    patch.setattr(AdamW, "learning_rate", property(lambda optimizer: 1e-3))


def bad_rows_vanish(patch):
    from unfreeze.data.store import encoding

    real = encoding.raw_rows

    def good_ones(path, columns=()):
        parse = encoding.parser(path, columns)
        for place, raw in real(path, columns):
            try:
                parse(raw, place)
            except DataError:
                continue
            yield place, raw

    patch.setattr(encoding, "raw_rows", good_ones)


def read_as_four_bits(patch):
    manifest, formats = (import_module(f"unfreeze.{n}") for n in ("checkpoint.manifest", "quant.formats"))
    real = formats.recognise

    def careless(config):
        config = deepcopy(dict(config))
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
        return real(config)

    patch.setattr(manifest, "recognise", careless)
    patch.setattr(formats, "recognise", careless)


def mean_of_batch_means(patch):
    real = numbers.heldout

    def means(model, batches):
        parts = [real(model, [batch]).loss for batch in batches]
        loss = sum(parts) / len(parts)
        return SimpleNamespace(loss=loss, perplexity=math.exp(loss))

    patch.setattr(numbers, "heldout", means)


def in_this_process(config):
    from unfreeze.core.command import Common
    from unfreeze.recipes import sft

    sft.train(config, Common(quiet=True))


def resume_from_fresh(patch):
    """Going on without the saved weights and moments; the processes are replaced by this one, which is what
    makes the arm quick."""

    def killed(config, run):
        in_this_process(config)
        shutil.rmtree(run / "state" / f"step-{runs.KILL_STEPS:06d}")
        shutil.rmtree(run / "adapter")
        return runs.KILL_STEPS - 1

    patch.setattr(runs, "kill_in_training", killed)
    patch.setattr(runs, "train_together", lambda config, run: in_this_process(config))
    patch.setattr("unfreeze.train.state._load_tensors", nothing)


def no_patience(patch):
    """Processes that wait for each other look like this: none has ended when the patience has."""
    patch.setattr(processes, "PATIENCE", 0.2)


def twice_the_weights(patch):
    patch.setattr(Plan, "per_device", property(lambda plan: [2 * plan.total, plan.total]))


def no_receipt(patch):
    patch.setattr("unfreeze.adapters.receipt.check", nothing)


def no_faults(patch):
    patch.setattr(Faults, "raise_if_any", nothing)


def no_coverage(patch):
    patch.setattr(loading, "check_coverage", nothing)


def dead_experts_hidden(patch):
    patch.setattr("unfreeze.report.experts.ExpertWatch._judge", lambda *arguments: [])


def no_verification(patch):
    patch.setattr(runs, "verify_adapter", nothing)


def no_lock(patch):
    patch.setattr("unfreeze.train.run._take_lock", lambda path: (path / "lock").open("a+"))


def usage_believed(patch):
    patch.setattr("unfreeze.synth.run.checked", lambda *arguments: Usage(9, 9))


def booked_after_the_answer(patch):
    real = bills.Server.post

    def late(server, path, body, reserve, **options):
        answer = real(server, path, body, nothing, **options)
        reserve()
        return answer

    patch.setattr(bills.Server, "post", late)


def out(target, name, value=nothing):
    """The usual case: one function replaced by one that does nothing."""
    return lambda patch: patch.setattr(target, name, value)


CONTROLS = {
    "L1 a 4-bit checkpoint expanded or packed again on load": expand_on_load,
    "L2 the CUDA allocator left to fragment": out(loading, "pick_device"),
    "L2 an allocator setting without expandable segments": out(loading, "allocator_line", lambda: ("", True)),
    "L3 one device with twice the weights": twice_the_weights,
    "L4 an adapter target that matches nothing": out(
        import_module("unfreeze.adapters.attach"), "chosen_by", lambda config, model: {}
    ),
    **dict.fromkeys([name for name in FAULTS if name.startswith("L4") and "target" not in name], no_receipt),
    "L5 a gate that does not train, or routes differently in training": router_detached,
    "L6 expanded weights that accumulate over the steps": leak_each_step,
    **dict.fromkeys([name for name in FAULTS if name.startswith("L7") and "8-bit" not in name], no_faults),
    "L7 4-bit words declared as 8-bit": read_as_four_bits,
    "L8 a tensor of size zero": no_faults,
    "L8 a parameter that no file fills": no_coverage,
    "L8 a parameter left on the meta device": lambda patch: patch.setattr(
        "unfreeze.parallel.placement.place._check_fillable", nothing
    ),
    "L9 a tokenizer that brings code to run": run_what_lies_there,
    "L9 a tokenizer that is only code": run_what_lies_there,
    "N1 a zero row and a tiny norm eps": norm_in_half,
    "N1 NaN only at unsupervised positions": replay_left_out,
    "N2 a row cut before its answer": out(Account, "_list"),
    "N2 a micro-batch without supervised tokens": each_its_own_mean,
    "N3 gradient accumulation as a mean of means": each_its_own_mean,
    "N4 labels shifted twice, or not at all": unshifted,
    "N4 a loss mask lost in a refactor": supervise_all,
    "N4 a template that rewrites earlier turns": trust_the_template,
    "N4 a mask of all ones": lambda patch: patch.setattr(
        "unfreeze.data.tokens.turns.check_marks", lambda *arguments: []
    ),
    "N5 a tokenizer with more ids than the embedding": no_vocabulary_check,
    "N5 padded rows of the head sampled": sample_every_row,
    "N6 pad = eos, so that the end is never learned": end_masked,
    "N7 num_logits_to_keep in the training config": unknown_keys_pass,
    "N7 num_logits_to_keep in the checkpoint's config": last_logits_only,
    "N8 perplexity that depends on the batch size": mean_of_batch_means,
    "N9 cached decoding that differs from uncached": stale_cache,
    "M1 experts without tokens, while processes wait for each other": no_patience,
    "M1 experts without tokens, left out of the all-reduce": only_reached_experts,
    "M2 balancing per micro-batch, per recomputation or in evaluation": lambda patch: patch.setattr(
        "unfreeze.train.step.clear_expert_load", nothing
    ),
    "M3 dead experts unnoticed": dead_experts_hidden,
    "M4 routing that changes between forward and recompute": route_again,
    "M4 routing that differs between trainer and sampler": stale_cache,
    "R1 kill -9 in the middle of training and saving": resume_from_fresh,
    "R1 a partial save left behind": half_saves_count,
    "R2 a save that lost its optimizer": lambda patch: patch.setattr(
        "unfreeze.train.state._load_tensors", nothing
    ),
    "R2 another configuration in the same folder": out(Run, "refuse_changes"),
    "R2 other data behind the same cursor": out(Batches, "_refuse_other"),
    "R3 a run resumed with another number of processes": resume_from_fresh,
    "R4 a learning rate that is not the schedule's": rate_as_meant,
    "R5 an exported adapter that lost one expert": no_verification,
    **dict.fromkeys([name for name in FAULTS if name.startswith("R7")], bad_rows_vanish),
    "R6 prompts for a paid server, without a ceiling": out(Ceiling, "worst", lambda *arguments: ""),
    "R6 a server whose price is unknown": out(Ceiling, "worst", lambda *arguments: ""),
    "R6 seeds that grew after they were priced": out(
        import_module("unfreeze.synth.plan"), "file_hash", lambda path: "as before"
    ),
    "R6 a server that bills more than max_tokens": usage_believed,
    "R6 a run killed and repeated with requests under way": booked_after_the_answer,
    "R7 a line of 10 MB": lambda patch: patch.setattr("unfreeze.data.rows.lines.MAX_ROW_BYTES", 1_000_000),
    "R7 a row longer than the sequence": out(Account, "_count"),
    "R7 a byte order mark": lambda patch: patch.setattr(
        "unfreeze.data.rows.lines.without_bom", lambda line, path: line
    ),
    "R8 two runs in one folder": no_lock,
    "R9 a process that is killed while others compute with it": nobody_looks,
    "R9 processes that read other data": lambda patch: patch.setattr(runs, "agree", nothing),
    "G1 a task that the model never solves": out(Rollouts, "refuse"),
    "G1 a reward that is constant": out(Rollouts, "refuse"),
    "G2 a reward that is NaN": out(import_module("unfreeze.rollout.rollouts"), "refuse_failures"),
    "G2 a reward that never ends": out(Rollouts, "refuse"),
    "G3 a reward that follows length": lambda patch: patch.setattr(canaries, "RISE", math.inf),
    "G4 a trainer that computes other log-probabilities": out(Rewarding, "watch_gap"),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("unfreeze-drill-"))


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch):
    """The command makes 50 and 256 steps, as the rows ask for; the guards answer to fewer as well."""
    monkeypatch.setattr(loading, "MEMORY_STEPS", 12)
    monkeypatch.setattr(numbers, "GREEDY_TOKENS", 48)


@pytest.mark.parametrize("name", nightly(FAULTS, TWINS))
def test_every_fault_is_named(sandbox, name):
    entry = drill.plant(FAULTS[name], sandbox)
    assert entry["named"], entry["line"]
    assert entry["line"] and re.fullmatch(r"[a-z0-9_.]+:\w[\w.]*", entry["caught_by"]), entry["caught_by"]


@pytest.mark.parametrize("name", nightly(CONTROLS, ["R1 kill -9 in the middle of training and saving"]))
def test_control_arm_without_its_guard_the_fault_goes_unnamed(sandbox, name, monkeypatch):
    CONTROLS[name](monkeypatch)
    assert not drill.plant(FAULTS[name], sandbox)["named"]


def test_every_row_has_a_fault_and_every_fault_a_control_arm():
    assert len(ROWS) == 35 and {fault.row for fault in FAULTS.values()} == set(ROWS)
    assert FAULTS.keys() - CONTROLS.keys() == set()


def test_what_is_planted_nightly_alone_has_its_twin():
    assert TWINS.keys() <= FAULTS.keys() and len(TWINS) == 3
    for twin in TWINS.values():
        file, _, name = twin.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


def test_silence_a_wrong_line_and_a_traceback_are_all_unnamed(sandbox):
    def wrong():
        raise ConfigError("rank = 0")

    plants = {
        "it passed in silence": lambda s: must_refuse(lambda: None, says="x"),
        "does not say 'x'": lambda s: must_refuse(wrong, says="x"),
        "a user would see a traceback: ZeroDivisionError": lambda s: 1 / 0,
        "5 of 4": lambda s: measured(drill.plant, "5 of 4", holds=False),
        "no line says 'x'": lambda s: said(drill.plant, "", says="x"),
    }
    for line, plant in plants.items():
        entry = drill.plant(Fault("L1", "planted", plant), sandbox)
        assert not entry["named"] and line in entry["line"]


def test_the_command_shows_the_table_and_ends_with_0(capsys):
    assert cli.main(["drill", "--only", "L4", "R8", "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert result["rows"] == result["rows_named"] == 2 and {entry["row"] for entry in result["faults"]} == {
        "L4",
        "R8",
    }
    assert "unfreeze-drill-" not in said.out and "1/7  L4  named" in said.err
    assert cli.main(["drill", "--only", "r8", "--quiet"]) == 0
    assert cli.main(["drill", "--only", "R8"]) == 0
    assert "1/1 rows named, 1 faults planted" in capsys.readouterr().out


def test_an_unnamed_fault_ends_it_with_1(monkeypatch, capsys):
    no_lock(monkeypatch)
    assert cli.main(["drill", "--only", "R8"]) == 1
    assert "0/1 rows named, 1 faults planted; unnamed: R8" in capsys.readouterr().out


def test_an_unknown_row_is_refused():
    with pytest.raises(ConfigError, match="'R10' is not a row of the drill"):
        drill.main(["--only", "R10"], Common(quiet=True))
