"""Two processes that train one model: gradients, resume, starved experts, and what they do when one of them
fails (docs/why/trust.md N3, M1, R3).

Process-heavy: this file is also the script that the two processes run (see main), started once for all claims
and once for the control arm.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.data import Example, pack
from unfreeze.evaluate.perplexity import dealt_batches, heldout
from unfreeze.job.watch.samples import of_the_first
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes import collectives
from unfreeze.parallel.processes.collectives import ALONE, Group, buckets, fingerprint, open_group
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.follower import Follower, open_run
from unfreeze.train.memory import peak_bytes
from unfreeze.train.nonfinite import investigate
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume
from unfreeze.train.step import train_step
from unfreeze.train.timer import Saves

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
LENGTHS = [3, 5, 40, 2, 4, 7, 60, 30]  # very unequal,
SUPERVISED = [1, 4, 35, 1, 0, 6, 2, 0]  # and the fifth and the last row fully masked
ACCUMULATION = (1, 2, 4, 8)
STEPS = 6
LAYERS = CONFIG["num_hidden_layers"]


def documents() -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    return [
        Example(torch.randint(0, 32, (n,), generator=generator).tolist(), [0.0] * (n - k) + [1.0] * k)
        for n, k in zip(LENGTHS, SUPERVISED, strict=True)
    ]


def cut(pieces: int, packed: bool) -> list[Batch]:
    """The eight documents in `pieces` micro-batches; one by one: a batch per document, whatever `pieces`
    is."""
    examples = documents()
    size = len(examples) // pieces if packed else 1
    return [pack(examples[i : i + size]) for i in range(0, len(examples), size)]


def decoder(family: str = "deepseek_v3", config: dict[str, Any] | None = None) -> models.Decoder:
    """A random model of CONFIG, or of another config."""
    llama = {"model_type": "llama", "tie_word_embeddings": True}
    model = models.build(
        models.shape(config or (CONFIG if family == "deepseek_v3" else {**CONFIG, **llama})),
        dtype=torch.float32,
        device="cpu",
    )
    models.initialize(model, 0)
    return model


def gradients(family: str, batches: list[Batch], group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = decoder(family)
    optimizer = AdamW(model)
    recompute = models.keep_inputs if family == "deepseek_v3" else models.plain
    result = train_step(
        model,
        optimizer,
        batches,
        cross_entropy,
        learning_rate=1e-3,
        max_norm=0.0,
        recompute=recompute,
        group=group,
    )
    found = {
        name: optimizer.gradient(name).clone()
        for name in optimizer.parameters
        if optimizer.gradient(name) is not None
    }  # type: ignore[union-attr]
    facts = {
        "loss": result.loss,
        "tokens": result.tokens,
        "supervised": result.supervised_tokens,
        "grad_norm": result.grad_norm,
        "peak": result.peak_bytes,
    }
    return found, {
        **facts,
        "load": {str(layer): load for layer, load in result.expert_load.items()},
        **result.metrics,
    }


def endless(start: dict[str, Any] | None) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
    position, examples = start["position"] if start else 0, documents()
    while True:
        chosen = [[examples[((position + m) * 3 + i) % 8] for i in range(3)] for m in range(2)]
        position += 2
        yield [pack(each) for each in chosen], {"position": position}


def session(
    folder: Path,
    group: Group,
    until: int,
    exchanges: list[int] | None = None,
    late: bool = False,
    clock: Iterator[float] | None = None,
    due: list[bool] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train to step `until` of STEPS, as if a Ctrl-C came during it; on this process.

    late: it comes behind the step, in a hook. exchanges: collectives of each step, hooks and saves aside.
    clock: saves are made by it, after 5 minutes, instead of each step; due: whether a step's result asks."""
    losses: list[float] = []
    calls = [0]

    def ctrl_c(step: int) -> None:
        # the signal reaches one process only; all must stop at this step
        if step == until and group.rank == group.size - 1:
            os.kill(os.getpid(), 2)

    def look(state: Any, result: Any) -> None:
        losses.append(result.loss)
        if due is not None:
            due.append(result.save)
        if exchanges is not None:
            exchanges.append(calls[0])
        if late:
            ctrl_c(state.step)

    def batches(start: dict[str, Any] | None) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        for item in endless(start):
            calls[0] = 0  # a step begins
            if not late:
                ctrl_c(state.step + 1)
            yield item

    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return all_reduce(*args, **kwargs)

    with open_run(
        group, lambda: Run(folder, {"model": "d"}), lambda: Follower(folder, {"model": "d"})
    ) as run:
        model = decoder()
        state = start_or_resume(
            run,
            model,
            optimizer=AdamW(model),
            schedule=Schedule(1e-2, STEPS),
            after_update=[LossFreeBalance(model, 0.01)],
        )
        dist.all_reduce = counted
        try:
            fit(
                state,
                batches(state.cursor),
                cross_entropy,
                recompute=models.keep_inputs,
                saves=Saves(every=1) if clock is None else Saves(minutes=5, clock=lambda: next(clock)),
                on_step=[look],
                group=group,
            )
        finally:
            dist.all_reduce = all_reduce
        assert state.after_update[0].num_updates == len(losses)  # type: ignore[attr-defined]
        return losses, {name: tensor.clone() for name, tensor in state.tensors().items()}


class Starved(nn.Module):
    """Experts as separate parameters, which autograd gives no gradient where no token came: what stacked
    tensors avoid."""

    def __init__(self, reached: list[int]):
        super().__init__()
        torch.manual_seed(0)
        self.reached, self.device, self.lm_head = reached, torch.device("cpu"), nn.Linear(4, 32)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(4)])

    def moe_names(self) -> dict[int, str]:
        return {layer: str(layer) for layer in self.moe_layers()}

    def moe_layers(self) -> dict[int, Any]:
        return {}

    def hidden(self, batch: Batch, recompute: Any) -> Tensor:
        return torch.stack([self.experts[i] for i in self.reached]).sum(0).expand(batch.num_tokens, 4)


def says(action: Callable[[], Any]) -> str:
    try:
        action()
    except UserError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def main(folder: Path) -> None:
    """What each of the two processes does; process r leaves facts-r.json, the first also gradients."""
    facts: dict[str, Any] = {}
    passes = [0]

    def counting(*arguments: Any) -> Any:
        passes[0] += 1
        return models.plain(*arguments)

    with open_group(torch.device("cpu")) as group:
        for family in ("deepseek_v3", "llama"):
            for pieces, packed in [(pieces, True) for pieces in ACCUMULATION[1:]] + [(8, False)]:
                found, facts[f"{family} {pieces} {packed}"] = gradients(family, cut(pieces, packed), group)
                save_file(found, folder / f"{family}-{pieces}-{packed}-{group.rank}.safetensors")
        facts["too few"] = says(lambda: gradients("llama", cut(1, True), group))
        facts["uneven"] = says(lambda: gradients("llama", cut(4, True)[:3], group))
        facts["other data"] = says(lambda: gradients("llama", cut(2 if group.rank else 4, True)[:2], group))

        starved = Starved([0, 1] if group.rank == 0 else [2])
        optimizer = AdamW(starved)
        batches = cut(2, True)
        train_step(
            starved,
            optimizer,
            batches,
            cross_entropy,
            learning_rate=1e-3,
            max_norm=0.0,
            recompute=models.plain,
            group=group,
        )  # type: ignore[arg-type]
        facts["starved"] = [optimizer.gradient(f"experts.{i}") is not None for i in range(4)]

        poisoned = decoder("llama")
        with torch.no_grad():  # only the micro-batch of the second process has the third document's token
            poisoned.model.embed_tokens.weight[31 if group.rank else 0] = math.nan if group.rank else 1.0
        batches = [pack([Example([1, 2, 3], [0.0, 1.0, 1.0])]), pack([Example([31, 2, 3], [0.0, 1.0, 1.0])])]
        facts["nan"] = says(
            lambda: train_step(
                poisoned,
                AdamW(poisoned),
                batches,
                cross_entropy,
                learning_rate=1e-3,
                max_norm=0.0,
                recompute=models.plain,
                group=group,
            )
        )

        own = folder / f"own-{group.rank}"
        own.mkdir()
        facts["found"] = investigate(
            poisoned, batches, cross_entropy, recompute=models.plain, group=group, folder=own, step=1
        ).line
        facts["suspects"] = [
            json.loads(line)["tokens"] for line in (own / "suspects.jsonl").read_text().splitlines()
        ]
        facts["lead"] = group.on_rank0(lambda: f"acted in {group.rank}")

        def fail() -> None:
            raise ConfigError("planted")

        facts["lead fails"] = says(lambda: group.on_rank0(fail))
        facts["any"] = [group.any(group.rank == 1), group.any(False)]
        facts["texts"] = group.texts("" if group.rank == 0 else "line of the second: ü")
        batches = cut(8, False)[:3]  # of three batches the second process has one, and one without weight
        facts["held out"] = asdict(heldout(decoder("llama"), batches, bytes_total=99, group=group))
        passes[0] = 0
        facts["dealt"] = [int(batch.weights_T.sum()) for batch in dealt_batches(batches, group)]
        # the first of two micro-batches of the second process: the first process looks no further either
        batches = [pack([Example([n, 2, 3], [0.0, 1.0, 1.0])]) for n in (1, 31, 2, 3)]
        facts["found early"] = investigate(
            poisoned, batches, cross_entropy, recompute=counting, group=group, folder=own, step=2
        ).line
        facts["passes"] = passes[0]
        facts["tie"] = of_the_first(group, torch.device("cpu"), [7 + group.rank, 3 - group.rank])
        facts["peak"] = [gradients("llama", cut(2, True), group)[1]["peak"], peak_bytes(torch.device("cpu"))]
        group.check_replicas({"same": torch.ones(3)})
        facts["replicas"] = says(
            lambda: group.check_replicas(
                {"same": torch.ones(3), "weight": torch.tensor([1.0, 2.0 + group.rank * 2e-7])}
            )
        )
        exchanges: list[int] = []
        facts["losses"], _ = session(folder / "resumed", group, until=4, exchanges=exchanges)
        facts["exchanges"] = exchanges
        facts["buckets"] = len(list(buckets(list(AdamW(decoder()).masters.values()))))
        # the clock of the first process: 200 s between two looks; the second's would save at every step
        by_clock, due = [200.0 * i if group.rank == 0 else 1e6 * i for i in range(100)], []
        session(folder / "by-clock", group, until=STEPS, clock=iter(by_clock), due=due, exchanges=exchanges)
        facts["due"] = due
        facts["late"] = len(session(folder / "late", group, until=2, late=True)[0])
        facts["unreached by all"] = says(lambda: AdamW(starved).keep_reached([0.0] * 4))
    (folder / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def hang(folder: Path) -> None:
    """Control arm of M1: all-reduce only what has a gradient here, with a short timeout so that the test
    ends."""
    from datetime import timedelta

    collectives.TIMEOUT = timedelta(seconds=2)
    with open_group(torch.device("cpu")) as group:
        starved = Starved([0, 1] if group.rank == 0 else [2])
        starved.hidden(cut(1, True)[0], None).sum().backward()
        for parameter in starved.experts:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        dist.barrier()
        (folder / f"survived-{group.rank}").touch()


def launch(forkserver: Any, mode: str, folder: Path, timeout: float) -> tuple[list[int], str]:
    """This file as a script in two processes -> their exit codes and what they said. A process still running
    after `timeout` seconds is killed: code -9."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        forkserver.start(
            [__file__, mode, folder], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + timeout
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    return codes, "".join(process.stderr.read_text() for process in processes)


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, forkserver: Any
) -> tuple[Path, list[dict[str, Any]], list[float]]:
    """(folder, facts of both processes, losses of steps 1 and 2 made here before by one process)."""
    folder = tmp_path_factory.mktemp("two")
    first, _ = session(folder / "resumed", ALONE, until=2)
    codes, said = launch(forkserver, "main", folder, timeout=240)
    assert codes == [0, 0], said
    return folder, [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in (0, 1)], first


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_gradients_are_those_of_one_batch_over_accumulation_packing_and_processes(two, family: str):
    folder, (facts, other), _ = two
    expected, whole = gradients(family, cut(1, True), ALONE)
    arrangements = {
        f"{pieces} {packed}": gradients(family, cut(pieces, packed), ALONE)
        for pieces, packed in [(2, True), (4, True), (8, False)]
    }
    for pieces, packed in [(pieces, True) for pieces in ACCUMULATION[1:]] + [(8, False)]:
        name = f"{family}-{pieces}-{packed}"
        loaded = load_file(folder / f"{name}-0.safetensors"), load_file(folder / f"{name}-1.safetensors")
        # replicas: the same bits
        assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[0])
        arrangements[f"{pieces} {packed} on 2"] = loaded[0], facts[f"{family} {pieces} {packed}"]
        assert facts[f"{family} {pieces} {packed}"] == other[f"{family} {pieces} {packed}"]
    assert len(arrangements) == 7
    for name, (found, step) in arrangements.items():
        assert found.keys() == expected.keys(), name
        difference = math.sqrt(
            sum(float((found[key].double() - expected[key].double()).square().sum()) for key in expected)
        )
        assert difference <= 1e-6 * math.sqrt(
            sum(float(g.double().square().sum()) for g in expected.values())
        ), name
        assert step["loss"] == pytest.approx(whole["loss"], rel=1e-6) and step["grad_norm"] == pytest.approx(
            whole["grad_norm"], rel=1e-6
        )
        assert (step["tokens"], step["supervised"], step["load"]) == (
            sum(LENGTHS),
            sum(SUPERVISED),
            whole["load"],
        ), name


@pytest.mark.parametrize("pieces", ACCUMULATION[1:])
def test_control_arm_the_mean_of_means_is_off_by_more_than_a_tenth(pieces: int):
    """What averaging over micro-batches and over processes gives: each mean weighs its tokens by how few
    there are."""
    expected, _ = gradients("deepseek_v3", cut(1, True), ALONE)
    model, batches = decoder(), cut(pieces, True)
    for batch in batches:
        loss = cross_entropy(model.hidden(batch), model.lm_head, batch)
        (loss.sum / max(loss.count, 1.0) / len(batches)).backward()
    wrong = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    difference = math.sqrt(sum(float((wrong[key] - expected[key]).square().sum()) for key in expected))
    assert difference > 0.1 * math.sqrt(sum(float(g.square().sum()) for g in expected.values()))


def test_resume_on_one_then_two_then_one_process(two):
    folder, (facts, other), first = two
    straight, expected = session(folder / "straight", ALONE, until=STEPS)
    last, tensors = session(folder / "resumed", ALONE, until=STEPS)
    assert facts["losses"] == other["losses"] and (len(first), len(facts["losses"]), len(last)) == (2, 2, 2)
    assert first + facts["losses"] + last == pytest.approx(straight, rel=1e-6)
    for name, tensor in expected.items():
        # Adam divides by |g|: tiny gradients amplify rounding
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    events = [json.loads(line) for line in (folder / "resumed" / "events.jsonl").read_text().splitlines()]
    # each once: process 0 alone writes
    assert [event["step"] for event in events if event["kind"] == "train"] == list(range(1, STEPS + 1))
    assert expected.keys() == tensors.keys()


def test_a_step_of_two_processes_exchanges_gradients_and_one_tensor(two):
    """Sums, loads, who was reached, who was told to stop and whether a save is due: one exchange, where saves
    are made by the clock too. The control arm is
    `train/test_no_sync.py`, where an exchange that waits is planted."""
    for facts in two[1]:
        assert facts["exchanges"] == (2 + STEPS) * [facts["buckets"] + 1]
        assert facts["unreached by all"] == "UserError: no gradient reached any of 6 trainable parameters"


def test_the_clock_of_the_first_process_says_to_all_at_which_steps_they_save(two):
    """The second's would say so at every step."""
    folder, facts, _ = two
    assert [each["due"] for each in facts] == 2 * [[False, True] * (STEPS // 2)]
    events = [json.loads(line) for line in (folder / "by-clock" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "save"] == [2, 4, 6]


def test_a_signal_behind_the_read_ends_all_processes_after_the_next_step(two):
    """To one process, in a hook of step 2: all of them save step 3 and stop."""
    assert [facts["late"] for facts in two[1]] == [3, 3]


def test_control_arm_balancing_by_the_counts_of_one_process_moves_other_biases():
    """M2: what an update from one process's share (the first of four) would do. The resume test above
    compares the biases of all counts."""
    _, whole = gradients("deepseek_v3", cut(8, True), ALONE)
    moved = []
    for load in (whole["load"], gradients("deepseek_v3", cut(8, True)[0::4], ALONE)[1]["load"]):
        balance = LossFreeBalance(decoder(), 0.01)
        balance({int(layer): counts for layer, counts in load.items()})
        moved.append(balance.biases[1])
    assert not torch.equal(*moved)


def test_control_arm_a_resume_that_loses_the_optimizer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    straight, _ = session(tmp_path / "straight", ALONE, until=4)
    session(tmp_path / "broken", ALONE, until=2)
    monkeypatch.setattr(
        "unfreeze.train.state._load_tensors",
        lambda saved, live, parts: [live[name].add_(1e-3) for name in live if "exp_avg." in name],
    )
    last, _ = session(tmp_path / "broken", ALONE, until=4)
    assert last != pytest.approx(straight[2:], rel=1e-6)


def test_experts_that_no_token_of_a_process_reached_hang_nobody(two):
    """M1: expert 3 was reached by no process, 2 by the second only; all calls matched, or the script would
    not have ended."""
    assert [facts["starved"] for facts in two[1]] == [[True, True, True, False]] * 2


def test_control_arm_collectives_that_depend_on_routing_hang(tmp_path: Path, forkserver: Any):
    codes, _ = launch(forkserver, "hang", tmp_path, timeout=60)
    assert any(codes) and not all((tmp_path / f"survived-{rank}").exists() for rank in (0, 1))


def test_held_out_batches_are_dealt_and_give_the_loss_of_one_process(two):
    batches = cut(8, False)[:3]
    expected = asdict(heldout(decoder("llama"), batches, bytes_total=99))
    first, second = (facts["held out"] for facts in two[1])
    assert first == second and first["tokens"] == expected["tokens"] == sum(SUPERVISED[:3])
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert first[name] == pytest.approx(expected[name], rel=1e-6)
    # as many passes in both, the last of the second process without weight
    assert [facts["dealt"] for facts in two[1]] == [[SUPERVISED[0], SUPERVISED[2]], [SUPERVISED[1], 0]]


def test_a_replay_makes_as_many_passes_in_every_process(two):
    """The NaN is in the second process's first micro-batch; alone the first would replay both of its own, each
    forward and backward."""
    line = "NaN first at model.embed_tokens, 1 of 3 positions, all supervised, float32, micro-batch 2, document 1"
    for facts in two[1]:
        assert facts["found early"].startswith(line)
    assert two[1][0]["passes"] == two[1][1]["passes"] == LAYERS


def test_all_processes_take_the_tokens_that_the_first_chose(two):
    assert [facts["tie"] for facts in two[1]] == [[7, 3], [7, 3]]


def test_the_memory_of_a_step_is_that_of_the_fullest_process(two):
    """The measured maximum over both; each looks again afterwards, when its own can only be higher."""
    (first, own), (second, other) = (facts["peak"] for facts in two[1])
    assert first == second and 0.8 * max(own, other) <= first <= max(own, other)


def test_failures_are_shared_and_named(two):
    first, second = two[1]
    for facts in (first, second):
        assert facts["too few"].startswith("ConfigError: 2 processes share 1 micro-batches of a step")
        assert facts["uneven"].startswith("ConfigError: 2 processes share 3 micro-batches of a step, not a")
        assert facts["other data"] == "DataError: the processes read different data at this step"
        assert facts["nan"] == "NonFinite: the loss is nan over 4 supervised tokens"
        assert facts["found"] == (  # the second process found it, both say it
            "NaN first at model.embed_tokens, 1 of 3 positions, all supervised, float32, micro-batch 2,"
            " document 1; 32 of 1,024 values of its weight are not finite"
        )
        assert facts["suspects"] == [[31, 2, 3]]
        assert facts["any"] == [True, False] and facts["texts"] == ["", "line of the second: ü"]
        assert (
            facts["replicas"]
            == "UserError: the 2 processes hold different values: 1 of 2 tensors differ; first: weight"
        )
    assert (first["lead"], second["lead"]) == ("acted in 0", None)
    assert first["lead fails"] == "ConfigError: planted"
    assert second["lead fails"] == "UserError: process 0 failed, so this one stops too"


def test_a_follower_reads_the_saves_and_leaves_nothing(tmp_path: Path):
    session(tmp_path / "run", ALONE, until=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with Run(tmp_path / "run", {"model": "d"}) as run, Follower(tmp_path / "run", {"model": "d"}) as follower:
        assert (follower.step, follower.cursor) == (run.step, run.cursor) == (2, {"position": 4})
        (follower.path / "receipt.json").write_text("{}")
        follower.events.emit("warning", 3, message="of one process")
        folder = follower.path
    assert not folder.exists()
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == before.keys()


def test_alone_does_nothing():
    tensor = torch.ones(2)
    ALONE.sum_([tensor])
    ALONE.check_replicas({"x": tensor})
    assert (
        tensor.eq(1).all()
        and ALONE.share([1, 2, 3]) == [1, 2, 3]
        and ALONE.texts("a") == ["a"]
        and ALONE.on_rank0(lambda: 5) == 5
    )
    assert ALONE.any(True) and not ALONE.any(False)


def test_buckets_keep_order_and_bound_their_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "BUCKET", 64)
    tensors = [
        torch.zeros(n, dtype=kind)
        for n, kind in [
            (4, torch.float32),
            (8, torch.float32),
            (8, torch.float32),
            (2, torch.float64),
            (99, torch.float64),
        ]
    ]
    found = list(buckets(tensors))
    assert [len(bucket) for bucket in found] == [2, 1, 1, 1]
    assert (
        all(a is b for a, b in zip([t for bucket in found for t in bucket], tensors, strict=True))
        and list(buckets([])) == []
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_a_fingerprint_sees_one_bit_and_the_order(dtype: torch.dtype):
    tensor = torch.arange(1, 101).to(dtype)
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    bit = tensor.clone()
    bit.view(torch.uint8)[7] ^= 1
    assert len({int(fingerprint(t)) for t in (tensor, swapped, bit)}) == 3 and int(
        fingerprint(tensor)
    ) == int(fingerprint(tensor.clone()))


if __name__ == "__main__":
    {"main": main, "hang": hang}[sys.argv[1]](Path(sys.argv[2]))
