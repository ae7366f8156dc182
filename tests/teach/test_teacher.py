"""A teacher beside a student: the plan against counted bytes; its weights and the student's gradients are left alone;
the contract of vocabularies."""

import hashlib
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.errors import CheckpointError
from unfreeze.core.layout import RESIDENT
from unfreeze.data import load_tokenizer
from unfreeze.generate.open import open_model
from unfreeze.kernels.attention import workspace
from unfreeze.kernels.expert_mlp import loop_cpu, release_scratch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.objectives.divergence import bytes_per_logit, divergence, divergence_rows
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Work, measure_sizes, plan
from unfreeze.parallel.plan.aside import Aside, aside_of
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import devices
from unfreeze.parallel.plan.rates import of_device
from unfreeze.parallel.plan.seconds import asking
from unfreeze.teach.store import IDS, LOG_Q, REST, said_in
from unfreeze.teach.teacher import Asked, teacher_log_probs
from unfreeze.teach.vocabulary import refuse_other, vocabulary

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
CPU = torch.device("cpu")


def config(width: int, vocab: int, layers: int = 2) -> dict:
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return LLAMA | sizes | {"vocab_size": vocab}


def a_model(width: int, vocab: int, dtype=torch.float32, seed=0, layers=2):
    model = models.build(models.shape(config(width, vocab, layers)), dtype=dtype, device="cpu")
    models.initialize(model, seed)
    return model


def batch_of(tokens: int, documents: int, vocab: int) -> Batch:
    length = tokens // documents
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (tokens,), generator=made)
    positions = torch.arange(length).repeat(documents)
    return Batch(ids, ids.roll(-1), torch.ones(tokens), positions, torch.arange(documents) * length)


def digest(model) -> str:
    whole = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def counted(live, patch, *, student: int, teacher: int, vocab: int, tokens: int, recompute: str, own=False):
    """(planned, counted) bytes of a step, but weights, adapters and moments."""
    patch.setattr(loop_cpu, "WORKERS_FROM", math.inf)  # torch's dispatch modes see the thread they are set in
    patch.setattr(workspace, "SPREAD_FROM", math.inf)
    release_scratch()
    dtype = torch.float32
    model = a_model(student, vocab)
    second = model if own else a_model(teacher, vocab, seed=1).eval().requires_grad_(False)
    lora = LoraConfig(rank=4)
    sizes = measure_sizes(model, lora)
    attach(model, lora, 0)
    batch = batch_of(tokens, 16, vocab)
    says = partial(teacher_log_probs, second, vocab, 1.0, own=own)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        hidden_TD = model.hidden(batch, models.RECOMPUTE[recompute])
        loss = divergence(hidden_TD, model.lm_head, batch, says, alpha=0.5)
        (loss.sum / loss.count).backward()

    there = [*model.parameters(), *model.buffers(), *second.parameters(), *second.buffers()]
    there += [batch.tokens_T, batch.targets_T, batch.weights_T, batch.positions_T]
    watch = live.Live(there)
    with watch:
        step()
        step()
    shape = models.shape(config(student if own else teacher, vocab))
    meta = models.build(shape, dtype=dtype, device="meta")
    rows = divergence_rows(0, vocab, dtype, CPU, False, 0.0)
    size = {"loss_rows": rows, "loss_bytes": bytes_per_logit(dtype, 0.0)}
    aside = aside_of(meta, tokens, tokens // 16, CPU, shared=own, **size)
    asks = {"rank": 4, "longest": tokens // 16, "threads": 1}
    work = Work(tokens=tokens, aside=aside, **size, **asks)
    machine = Hardware("cpu", "a machine", 1, 2**40, 2**40)
    terms = plan(sizes, RESIDENT.but(recompute=recompute), work, machine).terms
    apart = ("base", "second model", "adapter", "optimizer")
    return sum(size for name, size in terms.items() if name not in apart), watch.peak, terms, aside


CASES = {
    "the block of logits is the worst": {"student": 32, "teacher": 64, "vocab": 20_000, "tokens": 512},
    "the teacher's forward is the worst": {"student": 32, "teacher": 512, "vocab": 300, "tokens": 1024},
    "the student's backward is the worst": {"student": 256, "teacher": 32, "vocab": 300, "tokens": 1024},
}


@pytest.mark.parametrize(
    "case, recompute", [*((case, "layers") for case in CASES), (list(CASES)[1], "nothing")]
)
def test_the_plan_of_a_student_and_its_teacher_is_within_a_tenth(case, recompute, live, monkeypatch):
    planned, peak, terms, _ = counted(live, monkeypatch, recompute=recompute, **CASES[case])
    assert 0.9 < planned / peak < 1.1, (planned, peak, terms)


MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def a_teacher(kind: str, dtype: torch.dtype, device: str):
    """A dense model whose block of logits is the worst, one of unpacked experts, and tiny-k2's packed ones."""
    if kind == "packed experts":
        manifest = open_checkpoint(TINY_K2)
        if device == "meta":
            return models.meta_model(models.shape(manifest.config), manifest, dtype)
        return open_model(manifest, dtype, CPU)
    sizes = config(64, 20_000)
    if kind == "experts":
        sizes = config(384, 300) | MOE | {"moe_intermediate_size": 384}
    model = models.build(models.shape(sizes), dtype=dtype, device=device)
    if device != "meta":
        models.initialize(model, 1)
    return model


@pytest.mark.parametrize(
    "kind, dtype, tokens, temperature",
    [
        ("dense", torch.bfloat16, 512, 1.0),
        ("dense", torch.float32, 512, 2.0),
        ("experts", torch.bfloat16, 4096, 1.0),
        pytest.param("packed experts", torch.float32, 8192, 1.0, marks=pytest.mark.nightly),
        ("a store", torch.bfloat16, 512, 1.0),
    ],
)
def test_the_plan_is_within_a_tenth_for_experts_packed_ones_bf16_and_a_store(
    kind, dtype, tokens, temperature, live, monkeypatch
):
    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", math.inf)
    monkeypatch.setattr(workspace, "SPREAD_FROM", math.inf)
    release_scratch()
    documents, stored = 64, kind == "a store"
    meta = None if stored else a_teacher(kind, dtype, "meta")
    vocab = meta.shape.vocab_size if meta else 20_000
    student = a_model(32, vocab, dtype)
    sizes = measure_sizes(student, LoraConfig(rank=4))
    attach(student, LoraConfig(rank=4), 0)
    batch = batch_of(tokens, documents, vocab)
    there = [*student.parameters(), *student.buffers()]
    size = {
        "loss_rows": divergence_rows(0, vocab, dtype, CPU, False, 0.0),
        "loss_bytes": bytes_per_logit(dtype, 0.0),
    }
    if meta is None:
        ids_TK = torch.rand(tokens, vocab).topk(64).indices.int()
        log_q_TK, rest_T = torch.full((tokens, 64), math.log(0.9 / 64)), torch.full((tokens,), math.log(0.1))
        batch = replace(batch, extras={IDS: ids_TK, LOG_Q: log_q_TK, REST: rest_T})
        says, aside = (
            said_in,
            Aside(outputs=tokens * (8 * 64 + 4), **size),
        )  # those of the batch lie there already
        there += batch.extras.values()
    else:
        teacher = a_teacher(kind, dtype, "cpu").eval().requires_grad_(False)
        there += [*teacher.parameters(), *teacher.buffers()]
        says = partial(teacher_log_probs, teacher, vocab, temperature)
        aside = aside_of(meta, tokens, tokens // documents, CPU, **size)
    there += [batch.tokens_T, batch.targets_T, batch.weights_T, batch.positions_T]

    def step() -> None:
        student.zero_grad(set_to_none=True)
        hidden_TD = student.hidden(batch, models.RECOMPUTE["layers"])
        loss = divergence(hidden_TD, student.lm_head, batch, says, temperature=temperature)
        (loss.sum / loss.count).backward()

    with live.Live(there) as watch:
        step()
        step()
    asks = {"rank": 4, "longest": tokens // documents, "threads": 1}
    work = Work(tokens=tokens, aside=aside, **size, **asks)
    terms = plan(sizes, RESIDENT, work, Hardware("cpu", "a machine", 1, 2**40, 2**40)).terms
    apart = ("base", "second model", "adapter", "optimizer")
    planned = sum(size for name, size in terms.items() if name not in apart)
    assert 0.9 < planned / watch.peak < 1.1, (planned, watch.peak, terms)


def test_the_seconds_have_the_teachers_forward():
    """2 FLOP per weight and token, attention and head being small here: q, o D²; k, v D²/2; an MLP of 3 D, 9 D²."""
    rates = replace(of_device(next(iter(devices().values()))), norms=math.inf, passes=math.inf)
    found = []
    for layers in (2, 4):
        meta = models.build(models.shape(config(1024, 300, layers)), dtype=torch.bfloat16, device="meta")
        found.append(asking(counts(meta), rates, tokens=4096, length=64))
    flops = [2 * 4096 * layers * (1024 * 1024 * (1 + 0.5 + 0.5 + 1) + 9 * 1024 * 1024) for layers in (2, 4)]
    for seconds, flop in zip(found, flops, strict=True):
        assert seconds == pytest.approx(flop / rates.dense, rel=0.05)


def test_the_plan_of_the_base_as_teacher_is_within_a_tenth_and_has_no_second_model(live, monkeypatch):
    case = {"student": 128, "teacher": 0, "vocab": 2000, "tokens": 512}
    planned, peak, terms, aside = counted(live, monkeypatch, recompute="layers", own=True, **case)
    assert 0.9 < planned / peak < 1.1, (planned, peak, terms)
    assert aside.stays == 0 and "second model" not in terms


def test_control_arm_a_plan_that_forgets_the_teacher_is_seen(live, monkeypatch):
    case = CASES["the teacher's forward is the worst"]
    _, peak, _, aside = counted(live, monkeypatch, recompute="layers", **case)
    sizes = measure_sizes(
        models.build(models.shape(config(32, 300)), dtype=torch.float32, device="meta"), LoraConfig()
    )
    work = Work(tokens=1024, rank=4, loss_rows=aside.loss_rows, loss_bytes=aside.loss_bytes)
    terms = plan(sizes, RESIDENT, work, Hardware("cpu", "a machine", 1, 2**40, 2**40)).terms
    assert (
        sum(size for name, size in terms.items() if name not in ("base", "adapter", "optimizer")) < 0.8 * peak
    )
    assert Aside().stays == 0


@pytest.mark.parametrize("recompute", ["layers", "selective", "elementwise", "nothing"])
def test_asking_between_forward_and_backward_leaves_the_students_gradients_to_the_bit(recompute):
    """alpha = 1: the loss is cross entropy, whatever the teacher says; teacher and base keep every bit."""
    teacher, batch = a_model(48, 300, seed=1).eval().requires_grad_(False), batch_of(256, 4, 300)
    before = digest(teacher)
    gradients = []
    for own in (None, False, True):
        model = a_model(32, 300)
        attach(model, LoraConfig(rank=4), 0)
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
        says = partial(teacher_log_probs, model if own else teacher, 300, 1.0, own=bool(own))
        hidden = model.hidden(batch, models.RECOMPUTE[recompute])
        if own is None:
            loss = cross_entropy(hidden, model.lm_head, batch, impl="reference", block_rows=64)
        else:
            loss = divergence(hidden, model.lm_head, batch, says, alpha=1.0, block_rows=64)
        (loss.sum / loss.count).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert digest(teacher) == before and all(p.grad is None for p in teacher.parameters())
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.equal(other[name], gradients[0][name]) for name in other)


def test_the_base_as_a_teacher_says_what_the_base_says():
    model, batch = a_model(32, 300), batch_of(64, 2, 300)
    with torch.no_grad():
        plain = model.logits(model.hidden(batch)).log_softmax(-1)
    for site in attach(model, LoraConfig(rank=4), 0):
        torch.nn.init.normal_(site.adapter.B)
    said = teacher_log_probs(model, 300, 1.0, batch, own=True)(slice(0, 64), torch.empty(0))
    assert torch.equal(said, plain)
    with torch.no_grad():  # control: with its adapters on it says something else
        assert not torch.allclose(model.logits(model.hidden(batch)).log_softmax(-1), plain, atol=1e-2)


def test_a_teacher_speaks_of_the_words_alone_at_its_temperature(monkeypatch):
    """300 rows of a head, 280 words: what the padding would have is the words'. So for training and --prepare."""
    model, batch = a_model(32, 300), batch_of(64, 2, 280)
    with torch.no_grad():
        logits = model.logits(model.hidden(batch))
    teacher = Asked("padded", lambda says, words: says, temperature=1.5)
    monkeypatch.setattr(teacher, "_loaded", lambda device, dtype: model)
    teacher._words = 280
    for says in (teacher.load, lambda *where: teacher.objective(model, *where)):
        said = says(torch.device("cpu"), "float32")(batch)(slice(0, 64), torch.empty(0))
        torch.testing.assert_close(said, (logits[:, :280] / 1.5).log_softmax(-1), rtol=0, atol=1e-6)
    control = (logits / 1.5).log_softmax(-1)[:, :280]
    assert not torch.allclose(said, control, atol=1e-3)


def words(*texts: str, special: tuple[int, ...] = ()):
    return SimpleNamespace(
        named_size=len(texts), token_text=texts.__getitem__, special_ids=frozenset(special)
    )


def test_vocabularies_are_compared_word_by_word():
    own = vocabulary(words("a", "b", "<s>", special=(2,)))
    refuse_other(own, vocabulary(words("a", "b", "<s>", special=(2,))), "same")
    others = (
        words("b", "a", "<s>", special=(2,)),
        words("a", "b", "<s>"),
        words("a", "b", "<s>", "c", special=(2,)),
    )
    for other in others:
        with pytest.raises(CheckpointError) as refused:
            refuse_other(own, vocabulary(other), "T")
        assert own.hash in refused.value.message and vocabulary(other).hash in refused.value.message
    assert vocabulary(words("ab", "c")) != vocabulary(words("a", "bc"))


def test_a_vocabulary_is_that_of_the_tokenizer_whatever_its_template(tmp_path):
    import shutil

    shutil.copytree(TINY_K2, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert vocabulary(load_tokenizer(TINY_K2)) == vocabulary(load_tokenizer(tmp_path / "m"))
