"""On-policy distillation: λ = 0 is plain distillation to the bit, λ = 1 the student's own answers in every step; a
resumed run samples what an unbroken one does; processes divide the answers and all get all. And the student as
corrector, as a run."""

from __future__ import annotations

import json
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.data import Example, load_tokenizer, pack
from unfreeze.data.store.dataset import encode_file
from unfreeze.evaluate.perplexity import heldout
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.models import Decoder
from unfreeze.objectives.corrector import corrector
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.teach.on_policy import OnPolicy, groups, prompts
from unfreeze.teach.teacher import teacher_log_probs

DOCUMENTS = [
    Example([5, 6, 7, 40, 41, 42, 43], [0, 0, 0, 1, 1, 1, 1]),
    Example([9, 8, 300, 301, 302], [0, 0, 0.5, 0.5, 0]),
    Example([11, 12, 13], [0, 0, 0]),  # nothing of it is taught
    Example([77, 70, 71], [0, 1, 1]),
]


@pytest.fixture
def engine(tiny):
    return Engine(tiny.decoder, tokenizer=tiny.tokenizer, stop_ids=tiny.tokenizer.eos_ids)


def test_prompts_end_where_supervision_begins():
    found = list(prompts(pack(DOCUMENTS)))
    assert found == [([5, 6, 7], 4), ([9, 8], 3), ([11, 12, 13], 0), ([77], 2)]


def test_answers_are_the_engine_s_and_take_no_more_room(engine):
    batch, other = pack(DOCUMENTS), pack(DOCUMENTS[:1])
    found = OnPolicy(1.0, 0.0, seed=3)(engine, [batch, other], 7, ALONE)
    assert found is not None
    new, second = found.micro_batches
    assert new.num_tokens <= batch.num_tokens
    starts = [*new.starts_S.tolist(), new.num_tokens]
    documents = [new.tokens_T[a:b].tolist() for a, b in pairwise(starts)]
    weights = [new.weights_T[a:b].tolist() for a, b in pairwise(starts)]
    total = 0
    for document, weight, (prompt, room) in zip(documents, weights, prompts(batch), strict=True):
        alone = engine.generate([prompt], Sampling(max_new_tokens=room))[0].tokens if room else []
        assert document == prompt + alone
        level = 0.5 if prompt[0] == 9 else 1.0
        assert weight == [0.0] * (len(prompt) - 1) + [level] * len(alone) + [0.0]
        total += len(alone)
    assert found.answers == 4 and found.tokens == total + len(second.tokens_T) - 3


def test_a_step_is_the_student_s_own_with_probability_lambda():
    taken = [OnPolicy(0.3, 1.0, seed=1).takes(step) for step in range(4000)]
    assert abs(sum(taken) / 4000 - 0.3) < 3 * (0.3 * 0.7 / 4000) ** 0.5
    assert not any(OnPolicy(0.0, 1.0, 1).takes(step) for step in range(1000))
    assert all(OnPolicy(1.0, 1.0, 1).takes(step) for step in range(1000))
    assert taken != [OnPolicy(0.3, 1.0, seed=2).takes(step) for step in range(4000)]


def test_draws_depend_on_seed_step_and_place_alone(engine):
    def said(seed, step, **changes):
        found = OnPolicy(1.0, 1.0, seed)(engine, [pack(DOCUMENTS), pack(DOCUMENTS)], step, ALONE)
        return [batch.tokens_T.tolist() for batch in found.micro_batches]

    first = said(0, 4)
    torch.rand(7)
    assert said(0, 4) == first and first[0] != first[1]
    assert said(0, 5) != first and said(1, 4) != first


def test_the_cache_of_a_group_is_bounded():
    lengths = [100, 3, 4, 5, 90, 2, 2, 2]
    made = list(groups(lengths, 120))
    assert sorted(i for group in made for i in group) == list(range(8))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 120 for group in made)
    assert len(made) == 3


def test_each_answer_is_sampled_no_longer_than_it_may_be_and_alone_it_is_the_same(engine, monkeypatch):
    """A step of the model has a row for each document that has room left."""
    widths, step = [], Engine._step

    def counted(self, step_of, tokens):
        widths.append(len(tokens))
        return step(self, step_of, tokens)

    monkeypatch.setattr(Engine, "_step", counted)
    engine.stop_ids = frozenset()
    whole = OnPolicy(1.0, 1.0, seed=3)(engine, [pack(DOCUMENTS)], 7, ALONE)
    assert sum(widths) == sum(room - 1 for _, room in prompts(pack(DOCUMENTS)) if room)
    alone = OnPolicy(1.0, 1.0, seed=3)(engine, [pack(DOCUMENTS[:1])], 7, ALONE)
    assert whole is not None and alone is not None
    assert torch.equal(alone.micro_batches[0].tokens_T, whole.micro_batches[0].tokens_T[:7])


class Pair:
    """Two threads as two processes of a group."""

    size, lockstep = 2, False

    def __init__(self, rank, shared, barrier):
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def share(self, items):
        return list(items[self.rank :: 2])

    def texts(self, text):
        self.shared[self.rank] = text
        self.barrier.wait(20)
        return [self.shared[0], self.shared[1]]


def test_processes_divide_the_answers_and_all_get_all(tiny, engine):
    batches = [pack(DOCUMENTS), pack(DOCUMENTS[:2]), pack(DOCUMENTS[3:])]
    shared, barrier, found = {}, threading.Barrier(2), {}

    def work(rank):
        own = Engine(tiny.decoder, tokenizer=tiny.tokenizer, stop_ids=tiny.tokenizer.eos_ids)
        found[rank] = OnPolicy(1.0, 1.0, 0)(own, batches, 2, Pair(rank, shared, barrier))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    alone = OnPolicy(1.0, 1.0, 0)(engine, batches, 2, ALONE)
    assert [len(json.loads(shared[rank])) for rank in (0, 1)] == [2, 1]
    for rank in (0, 1):
        assert (found[rank].answers, found[rank].tokens) == (alone.answers, alone.tokens)
        for mine, expected in zip(found[rank].micro_batches, alone.micro_batches, strict=True):
            assert torch.equal(mine.tokens_T, expected.tokens_T)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """tiny-k2, less certain of what it says."""
    folder = tmp_path_factory.mktemp("teacher") / "flatter"
    shutil.copytree(TINY_K2, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in ("lm_head.weight", "model.norm.weight") if name in tensors)
    tensors[name] = tensors[name] * 0.7
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture
def distill(capsys, rows, teacher):
    def run(out: Path, *arguments, code=0):
        given = {
            "--model": TINY_K2,
            "--teacher": teacher,
            "--data": rows,
            "--out": out,
            "--tokens-per-step": 128,
        }
        given |= {
            "--watch.samples": 0,
            "--dtype": "float32",
            "--optimizer.warmup": 0,
            "--lora.rank": 2,
            "--optimizer.schedule": "constant",
        }
        given |= {"--lora.targets": "attention", "--learning-rate": "2e-3"}
        if "--tokens-per-step" in arguments:
            del given["--tokens-per-step"]
        words = [str(word) for pair in given.items() for word in pair]
        assert cli.main(["distill", "--json", *words, *map(str, arguments)]) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out.splitlines()[-1])

    return run


def adapter(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


def events(out, kind):
    lines = (out / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.nightly
def test_lambda_0_is_plain_distillation_to_the_bit(distill, tmp_path):
    plain, none = tmp_path / "plain", tmp_path / "none"
    distill(plain, "--steps", 2)
    distill(none, "--steps", 2, "--distillation.on-policy", 0)
    assert same(adapter(plain), adapter(none)) and not events(none, "on_policy")


OWN = ["--distillation.on-policy", 0.6, "--seed", 1, "--steps"]


def test_a_resumed_run_samples_what_an_unbroken_one_does(distill, tmp_path, monkeypatch):
    """And the plan has the memory of the largest cache."""
    whole, parts, caches, new = tmp_path / "whole", tmp_path / "parts", [], Decoder.new_cache

    def kept(self, *size, **how):
        caches.append(new(self, *size, **how))
        return caches[-1]

    monkeypatch.setattr(Decoder, "new_cache", kept)
    distill(whole, *OWN, 3)
    plan = json.loads((whole / "plan.json").read_text())
    planned = (plan["terms"] | plan["beside"])["KV cache of answers"]
    assert 0.5 * planned < max(cache.nbytes for cache in caches) <= planned
    distill(parts, *OWN, 1)
    distill(parts, *OWN, 3, "--save.allow-changed", "steps")
    assert same(adapter(whole), adapter(parts))
    sampled = [{**event, "time": 0, "seconds": 0} for event in events(whole, "on_policy")]
    assert sampled == [{**event, "time": 0, "seconds": 0} for event in events(parts, "on_policy")]
    assert 0 < len(sampled) < 3


@pytest.mark.nightly
def test_control_arm_other_draws_are_another_run(distill, tmp_path):
    whole, control = tmp_path / "whole", tmp_path / "control"
    distill(whole, *OWN, 2)
    distill(control, *OWN, 2, "--distillation.answer-temperature", 0.5)
    assert not same(adapter(whole), adapter(control))


def test_lambda_1_is_the_teacher_s_view_of_the_student_s_own_words(distill, tmp_path, teacher, rows, engine):
    """The first step's divergence, from greedy answers and torch's kl_div of all logits; what was learned there
    brings the student nearer to the teacher on these words."""
    out = tmp_path / "own"
    distill(
        out,
        "--distillation.on-policy",
        1,
        "--distillation.answer-temperature",
        0,
        "--steps",
        6,
        "--tokens-per-step",
        512,
    )
    tokenizer = load_tokenizer(TINY_K2)
    answers = []
    for example in encode_file(rows, tokenizer, 128).examples:
        ((prompt, room),) = prompts(pack([example]))
        answers.append((prompt, engine.generate([prompt], Sampling(max_new_tokens=room))[0].tokens))
    count = sum(len(answer) for _, answer in answers)

    def apart(student):
        total = 0.0
        for prompt, answer in answers:
            p, q = (
                model.logits([prompt + answer])[0].double()[:, : tokenizer.named_size].log_softmax(-1)
                for model in (student, other)
            )
            each = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
            total += float(each[len(prompt) - 1 : -1].sum())
        return total / count

    other = unfreeze.load(teacher, dtype="float32")
    steps, sampled = events(out, "train"), events(out, "on_policy")
    before = apart(unfreeze.load(TINY_K2, dtype="float32"))
    assert steps[0]["divergence"] == pytest.approx(before, rel=1e-4)
    assert [event["step"] for event in sampled] == [1, 2, 3, 4, 5, 6] and sampled[0]["tokens"] == count
    assert [event["tokens"] for event in sampled] == [event["supervised_tokens"] for event in steps]
    assert apart(unfreeze.load(out, dtype="float32")) < 0.9 * before


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--distillation.on-policy", 0.5, "--alpha", 0.5], "give only one of the two"),
        (["--distillation.answer-temperature", 0.5], "needs on_policy"),
        (
            ["--distillation.on-policy", 0.5, "--place.experts", "host"],
            "each token would transfer every layer",
        ),
        (["--distillation.gamma", 1, "--temperature", 2], "cannot be combined with temperature"),
        (["--distillation.gamma", 1, "--distillation.on-policy", 0.5], "cannot be combined with on_policy"),
    ],
)
def test_what_does_not_go_together_is_refused(distill, tmp_path, arguments, says):
    assert says in distill(tmp_path / "no", "--steps", 1, *arguments, code=2)
    assert not (tmp_path / "no" / "state").exists()


def test_the_student_as_corrector_of_a_frozen_teacher(distill, tmp_path, teacher, rows, held_rows):
    """Loss and held-out loss are those of both together, as evaluate has them of two models that were loaded."""
    out = tmp_path / "corrector"
    distill(
        out,
        "--distillation.gamma",
        0.5,
        "--steps",
        10,
        "--validation",
        held_rows,
        "--watch.validate-every",
        5,
    )
    tokenizer = load_tokenizer(TINY_K2)
    batch, taught = (pack(encode_file(file, tokenizer, 128).examples[:]) for file in (held_rows, rows))
    other = unfreeze.load(teacher, dtype="float32").decoder

    def both(student, gamma, batch=batch):
        def objective(hidden_TD, head, batch):
            says = lambda batch: teacher_log_probs(other, tokenizer.named_size, 1.0, batch)  # noqa: E731
            return corrector(hidden_TD, head, batch, says, gamma=gamma, vocab=tokenizer.named_size)

        return heldout(student, [batch], objective=objective).loss

    measured = [event["loss"] for event in events(out, "eval")]
    assert measured[0] == pytest.approx(both(unfreeze.load(TINY_K2, dtype="float32").decoder, 0.5), rel=1e-5)
    assert measured[-1] == pytest.approx(both(unfreeze.load(out, dtype="float32").decoder, 0.5), rel=1e-5)
    alone = both(unfreeze.load(TINY_K2, dtype="float32").decoder, 0.0)
    assert measured[-1] < measured[0] and measured[-1] < alone
    of_training = both(unfreeze.load(TINY_K2, dtype="float32").decoder, 0.0, taught)
    assert events(out, "train")[0]["teacher"] == pytest.approx(of_training, rel=0.2)
