"""Claims about comparing layers with a teacher's in a run: the loss is the sum that was asked for, in every mode of
recomputation; the teacher is as it was; projections are saved and gone on with, and left out of what is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli, models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import RESIDENT
from unfreeze.kernels.attention import workspace
from unfreeze.kernels.expert_mlp import loop_cpu, release_scratch
from unfreeze.models.publish import published
from unfreeze.objectives.divergence import bytes_per_logit, divergence, divergence_rows
from unfreeze.objectives.intermediate import Relations
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Work, measure_sizes, plan
from unfreeze.parallel.plan.aside import Aside, aside_of
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import teacher_log_probs
from unfreeze.train.optim import AdamW
from unfreeze.train.step import forward_backward, loss_of

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LARGER = {
    **CONFIG,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 4,
}
WORDS = 61


def made(config: dict, seed: int) -> models.Decoder:
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    return model


def batch() -> Batch:
    lengths = (7, 12, 5)
    tokens = torch.arange(sum(lengths)) * 7 % WORDS
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    return Batch(tokens, tokens.roll(-1), (tokens % 3 > 0).float(), positions, starts)


def objective(model: models.Decoder, teacher: models.Decoder, inside: Inside, words: int = WORDS):
    says = partial(teacher_log_probs, teacher, words, 1.0)
    return inside.objective(model, teacher, lambda batch, taps: says(batch, taps=taps), divergence)


@pytest.mark.parametrize("layers", [(), ((1, 2), (3, 4))])
def test_a_step_is_the_same_in_every_mode_and_the_teacher_has_no_part_in_it(layers):
    """Of models with other heads and widths; without the terms the loss is divergence alone."""
    teacher = made(LARGER, 1)
    teacher.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    found = {}
    for mode in models.RECOMPUTE:
        model = made(CONFIG, 0)
        whole = objective(model, teacher, Inside(0.7, 0.3, layers=layers))
        optimizer = AdamW(model)
        assert [n for n in optimizer.parameters if n.startswith("beside.")] == [
            f"beside.{own - 1}.weight" for own, _ in layers or ((3, 4),)
        ]
        result = forward_backward(model, optimizer, [batch()], whole, recompute=models.RECOMPUTE[mode])
        found[mode] = {name: optimizer.gradient(name).clone() for name in optimizer.parameters}
        parts = result.metrics
        expected = parts["divergence"] + 0.7 * parts["relations"] + 0.3 * parts["hidden"]
        assert result.loss == pytest.approx(expected, rel=1e-6) and parts["relations"] > 1e-3
    for gradients in found.values():
        assert all(torch.equal(gradients[name], found["nothing"][name]) for name in found["nothing"])
        assert all(gradient.any() for gradient in gradients.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_relations_alone_train_what_makes_queries_keys_and_values():
    """Control arm of the losses together: nothing behind the last layer's projections gets a gradient."""
    model, teacher = made(CONFIG, 0), made(LARGER, 1)
    inside = Inside(1.0)
    whole = objective(model, teacher, inside)

    def nothing(hidden_TD, lm_head, batch, said):
        loss = divergence(hidden_TD.detach(), lm_head.requires_grad_(False), batch, said)
        loss.sum = loss.sum.detach()
        return loss

    alone = type(whole)(nothing, whole.ask, whole.terms)
    optimizer = AdamW(model)
    forward_backward(model, optimizer, [batch()], alone, recompute=models.keep_inputs)
    last = {
        n
        for n in optimizer.parameters
        if n.startswith("model.layers.2.") and optimizer.gradient(n) is not None
    }
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
    )
    assert last == {f"model.layers.2.{name}.weight" for name in (*names, "input_layernorm")}
    assert optimizer.gradient("model.norm.weight") is None
    assert optimizer.gradient("model.layers.1.mlp.down_proj.weight") is not None


def test_what_it_takes_is_counted():
    """The tapped numbers of a token, and W; more tokens take as much more."""
    model, teacher = (
        models.build(models.shape(c), dtype=torch.bfloat16, device="meta") for c in (CONFIG, LARGER)
    )
    own, their = 4 * 8 + 2 * 2 * 8, 6 * 8 + 2 * 3 * 8
    read = Inside(1.0).read(model, teacher, 64, 64, 2)
    (term,) = Inside(1.0).terms(model, teacher)
    assert isinstance(term, Relations)
    scores = 4 * term.heads * 64 * 64
    assert read.tapped == 64 * 2 * (own + their)
    assert read.compared == 64 * 2 * (2 * own + their) + 3 * scores + 4 * 64 * (3 * 32 + 48)
    assert read.later == 64 * 2 * own and read.trained == 0
    assert Inside(0.0, 1.0, layers=((1, 1), (2, 2))).read(model, teacher, 64, 64, 2).trained == 2 * 32 * 48


@pytest.mark.parametrize(
    ("inside", "documents", "recompute"),
    [
        (Inside(1.0), 1, "layers"),
        (Inside(1.0), 32, "nothing"),
        (Inside(0.0, 1.0), 8, "layers"),
        (Inside(1.0, 1.0, layers=((1, 1), (2, 2))), 32, "nothing"),
    ],
)
def test_the_plan_is_within_a_tenth_of_counted_bytes(inside, documents, recompute, live, monkeypatch):
    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", math.inf)  # a dispatch mode sees the thread it is set in
    monkeypatch.setattr(workspace, "SPREAD_FROM", math.inf)
    release_scratch()
    tokens, vocab, lora = 1024 if recompute == "layers" else 512, 300, LoraConfig(rank=4)
    wide, wider = (
        {**CONFIG, "hidden_size": d, "intermediate_size": 3 * d, "head_dim": d // 4} for d in (128, 256)
    )
    configs = [
        {**c, "vocab_size": vocab, "num_hidden_layers": 2, "num_attention_heads": 4} for c in (wide, wider)
    ]
    model, teacher = (made({**c, "max_position_embeddings": 2048}, 0) for c in configs)
    teacher.eval().requires_grad_(False)
    sizes = measure_sizes(model, lora)
    attach(model, lora, 0)
    starts = torch.arange(0, tokens, tokens // documents)
    ids = torch.arange(tokens) * 7 % vocab
    given = Batch(ids, ids.roll(-1), torch.ones(tokens), torch.arange(tokens) % (tokens // documents), starts)
    whole = objective(model, teacher, inside, vocab)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, given, whole, models.RECOMPUTE[recompute])
        (loss.sum / loss.count).backward()

    there = [t for each in (model, teacher) for t in (*each.parameters(), *each.buffers())]
    with live.Live([*there, given.tokens_T, given.targets_T, given.weights_T, given.positions_T]) as seen:
        step()
        step()
    cpu, longest = torch.device("cpu"), tokens // documents
    size = {
        "loss_rows": divergence_rows(0, vocab, torch.float32, cpu, False, 0.0),
        "loss_bytes": bytes_per_logit(torch.float32, 0.0),
    }
    read = inside.read(model, teacher, tokens, longest, 4)
    meta = models.build(teacher.shape, dtype=torch.float32, device="meta")
    aside = replace(
        aside_of(meta, tokens, longest, cpu, **size),
        tapped=read.tapped,
        compared=read.compared,
        later=read.later,
    )
    asks = {"rank": 4, "longest": longest, "threads": 1}

    def planned(aside: Aside) -> int:
        work = Work(tokens=tokens, aside=aside, **size, **asks)
        terms = plan(
            sizes, RESIDENT.but(recompute=recompute), work, Hardware("cpu", "a machine", 1, 2**40, 2**40)
        ).terms
        return sum(
            n for name, n in terms.items() if name not in ("base", "second model", "adapter", "optimizer")
        )

    assert 0.9 < planned(aside) / seen.peak < 1.1, (planned(aside), seen.peak)
    without = planned(replace(aside, tapped=0, compared=0, later=0))  # control arm: what is read is forgotten
    assert without < 0.95 * planned(aside)


def test_layers_and_heads_that_are_not_there_are_refused():
    model, teacher = made(CONFIG, 0), made(LARGER, 1)
    for inside, says in {
        Inside(1.0, layers=((3, 5),)): "pair 3:5; the student has the layers 1 to 3, the teacher 1 to 4",
        Inside(1.0, heads=5): "relation_heads = 5",
    }.items():
        with pytest.raises(ConfigError, match=says):
            inside.terms(model, teacher)
    model.sharded = True
    with pytest.raises(ConfigError, match=r"--distillation\.hidden trains a matrix that cannot be sharded"):
        Inside(0.0, 1.0).terms(model, teacher)


# runs


@pytest.fixture
def distill(capsys, chat_rows, tmp_path):
    def run(*arguments, out=tmp_path / "student", steps=2, code=0, model=TINY_K2):
        given = ["--model", model, "--data", chat_rows, "--out", out, "--steps", steps, "--watch.samples", 0]
        more = [
            "--tokens-per-step",
            128,
            "--learning-rate",
            "5e-3",
            "--optimizer.warmup",
            0,
            "--optimizer.schedule",
            "constant",
        ]
        assert cli.main(list(map(str, ["distill", "--json", *given, *more, *arguments]))) == code
        said = capsys.readouterr()
        return said.err if code else Path(json.loads(said.out.splitlines()[-1])["run"])

    return run


def trains(run: Path) -> list[dict]:
    return [
        e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["kind"] == "train"
    ]


ASKED = [
    "--distillation.relations",
    2,
    "--distillation.hidden",
    0.5,
    "--distillation.layers",
    "1:2,3:3",
    "--lora.rank",
    2,
]


def test_a_run_broken_off_and_resumed_has_the_same_projections(distill, run_dir, tmp_path):
    whole = distill("--teacher", run_dir, *ASKED, out=tmp_path / "whole", steps=3)
    distill("--teacher", run_dir, *ASKED, out=tmp_path / "parts", steps=1)
    parts = distill(
        "--teacher", run_dir, *ASKED, "--save.allow-changed", "steps", out=tmp_path / "parts", steps=3
    )
    first = trains(whole)[0]
    assert first["loss"] == pytest.approx(
        first["divergence"] + 2 * first["relations"] + 0.5 * first["hidden"], rel=1e-5
    )
    saves = [load_file(run / "state" / "step-000003" / "tensors.safetensors") for run in (whole, parts)]
    learnt = [name for name in saves[0] if name.startswith("model.beside.")]
    assert learnt == ["model.beside.0.weight", "model.beside.2.weight"]
    assert all(torch.equal(saves[0][name], saves[1][name]) for name in saves[0])
    assert not torch.equal(saves[0][learnt[0]], torch.eye(len(saves[0][learnt[0]])))
    # nothing of them in what is left behind, and the plan knows them
    assert not any("beside" in name for name in load_file(whole / "adapter" / "adapter_model.safetensors"))
    terms = json.loads((whole / "plan.json").read_text())["terms"]
    assert terms["projections"] > 0 and terms["read inside of layers"] > 0


def test_every_weight_trained_the_checkpoint_has_none_of_them(distill, tmp_path):
    vocab = models.shape(open_checkpoint(TINY_K2).config).vocab_size
    folders = []
    for name, config, seed in (("student", CONFIG, 0), ("teacher", LARGER, 1)):
        config = {**config, "vocab_size": vocab, "num_hidden_layers": 2}
        save_checkpoint(tmp_path / name, config, published(made(config, seed), config))
        for file in ("tiktoken.model", "tokenizer_config.json"):
            (tmp_path / name / file).write_bytes((Path(TINY_K2) / file).read_bytes())
        folders.append(tmp_path / name)
    more = ["--train", "all", "--distillation.hidden", 1, "--distillation.relations", 1, "--dtype", "float32"]
    run = distill("--teacher", folders[1], *more, out=tmp_path / "run", model=folders[0], steps=1)
    assert not any("beside" in name for name in open_checkpoint(run / "model").tensors)
    assert "model.beside.1.weight" in load_file(run / "state" / "step-000001" / "tensors.safetensors")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--distillation.layers", "1:1"], "layers needs relations or hidden"),
        (["--distillation.relations", 1, "--distillation.layers", "1-1"], "layers"),
        (["--distillation.relations", 1, "--distillation.layers", "1:99"], "the student has the layers 1 to"),
        (["--distillation.relations", -1], "relations"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(distill, run_dir, arguments, says, tmp_path):
    assert says in distill("--teacher", run_dir, *arguments, code=2)
    assert not (tmp_path / "student" / "state").exists()


def test_a_store_of_words_has_no_layers(distill, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "teacher.json").write_text("{}")
    assert "compare layers" in distill(
        "--teacher", tmp_path / "store", "--distillation.relations", 0.1, code=2
    )
