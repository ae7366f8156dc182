"""The engine's thread: every promise is kept once, whatever comes, leaves or fails; and memory stays."""

import gc
import random
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch

from unfreeze import models
from unfreeze.core.errors import UserError
from unfreeze.generate.engine import Engine
from unfreeze.generate.live import Live
from unfreeze.generate.sampling import Sampling
from unfreeze.serve import speaker as speaker_file
from unfreeze.serve.request import Refused
from unfreeze.serve.speaker import Speaker, Work

SMALL = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 89,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LONGEST = 20  # seconds that a test waits for what should come at once


@pytest.fixture(scope="module")
def engine():
    model = models.build(models.shape(SMALL), dtype=torch.float32, device="cpu")
    models.initialize(model, seed=1)
    return Engine(model.eval().requires_grad_(False), stop_ids=frozenset(range(0, 89, 7)))


def work(dice=random, **fields):
    begin = [5, 6, 7, 8] * dice.randint(0, 6)
    prompt = begin + [dice.randrange(1, 89) for _ in range(dice.randint(1, 12))]
    n = dice.choice((1, 1, 1, 2, 3))
    sampling = Sampling(temperature=dice.choice((0.0, 1.0)), n=n, seeds=tuple(range(n)))
    return Work(prompt, sampling, dice.randint(1, 12), **fields)


class Refusing:
    """Adapters of which one is not there."""

    def __init__(self):
        self.held = 0

    def version(self, name):
        if name == "none":
            raise UserError("there is no adapter 'none'")
        self.held += 1
        return name

    def assign(self, versions):
        assert all(version in ("", "a") for version in versions)

    def leave(self, version):
        self.held -= 1


def raising(*_):
    raise ZeroDivisionError


def storm(engine, monkeypatch, seed, count=120):
    """Requests of every kind from three threads; some leave, some fail; the endpoint closes among them.

    -> how often each request ended, and its future.
    """
    ends, lock = {}, threading.Lock()
    settle = speaker_file._settle

    def counted(ended):
        for each in ended:
            ends[each.request] = ends.get(each.request, 0) + 1
        settle(ended)

    monkeypatch.setattr(speaker_file, "_settle", counted)
    adapters = Refusing()
    speaker = Speaker(engine, max_rows=4, max_wait=30, adapters=adapters)
    sent, refused = [], []

    def send(number):
        dice = random.Random(1000 * seed + number)
        for _ in range(count // 3):
            kind = dice.random()
            fields = {}
            if kind < 0.1:
                fields = {"heard": raising}
            elif kind < 0.2:
                fields = {"allow": raising}
            elif kind < 0.3:
                fields = {"adapter": "none"}
            elif kind < 0.4:
                fields = {"adapter": "a"}
            elif kind < 0.5:
                left = dice.randint(0, 6)
                fields = {"gone": lambda left=left, seen=[]: seen.append(0) or len(seen) > left}
            one = work(dice, **fields)
            try:
                future = speaker.submit(one)
            except Refused as error:
                with lock:
                    refused.append(error.status)
                continue
            with lock:
                sent.append((one, future))
            if kind > 0.9:
                future.cancel()
            if dice.random() < 0.3:
                time.sleep(0.002)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    if seed % 2:
        while len(sent) + len(refused) < count // 2:
            time.sleep(0.001)
        speaker.close(now=seed % 4 == 3)
    for thread in threads:
        thread.join(LONGEST)
    if not seed % 2:
        assert speaker.drain(LONGEST)
        speaker.close()
    assert not speaker._thread.is_alive()
    return ends, sent, refused, adapters


def kept(ends, sent, adapters):
    """True if every request ended once, and its future with it."""
    for one, future in sent:
        if ends.get(one, 0) != 1 or not future.done():
            return False
        if not future.cancelled() and future.exception() is None:
            answers, _ = future.result()
            if len(answers) != one.sampling.n or not all(1 <= len(a.tokens) <= one.most for a in answers):
                return False
    return adapters.held == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_promise_is_lost_and_none_is_kept_twice(engine, monkeypatch, seed):
    ends, sent, refused, adapters = storm(engine, monkeypatch, seed)
    assert kept(ends, sent, adapters) and len(sent) + len(refused) == 120
    kinds = {type(future.exception()) for _, future in sent if not future.cancelled()}
    assert {*refused} <= {429, 503}
    assert seed % 2 or {ZeroDivisionError, UserError, type(None)} <= kinds


def ends_twice(patch):
    """A request that is over is handed back again."""
    turn = Live.turn

    def again(self):
        ended = turn(self)
        return ended + ended[:1]

    patch.setattr(Live, "turn", again)


def loses_who_fails(patch):
    over = Live._over

    def lost(self, group, ended, **how):
        over(self, group, ended, **how)
        if isinstance(ended.error, ZeroDivisionError):
            self._ended.pop()

    patch.setattr(Live, "_over", lost)


def keeps_versions(patch):
    patch.setattr(Refusing, "leave", lambda self, version: None)


@pytest.mark.parametrize("fault", [ends_twice, loses_who_fails, keeps_versions])
def test_control_arm(engine, monkeypatch, fault):
    fault(monkeypatch)
    ends, sent, _, adapters = storm(engine, monkeypatch, 0)
    assert not kept(ends, sent, adapters)


def test_a_client_that_is_gone_frees_its_row_at_the_next_step(engine):
    speaker, heard = Speaker(engine, max_rows=1), []
    long = Work([1, 2, 3], Sampling(temperature=1.0, seeds=(5,)), 200, heard=heard.append)
    long.gone = lambda: len(heard) >= 3
    other = Work([1, 2, 3], Sampling(seeds=(1,)), 2)
    engine_stops, engine.stop_ids = engine.stop_ids, frozenset()
    try:
        first, second = speaker.submit(long), speaker.submit(other)
        assert second.result(LONGEST)
        with pytest.raises(CancelledError):
            first.result(LONGEST)
    finally:
        engine.stop_ids = engine_stops
    assert len(heard) == 3 and speaker.load().gone == 1
    speaker.close()


def test_while_it_is_paused_requests_wait_and_what_has_begun_ends(engine):
    """Training and serving in one process: the step waits for the answers, later requests for the step."""
    speaker, runs, go, order = Speaker(engine, max_rows=2), threading.Event(), threading.Event(), []
    begun = speaker.submit(work(heard=lambda piece: runs.set() or go.wait(LONGEST)))
    assert runs.wait(LONGEST)

    def train():
        with speaker.paused():
            order.append(begun.done())
            later.append(speaker.submit(work()))
            time.sleep(0.05)
            order.append(later[0].done() or speaker.load().running > 0 or speaker.load().cache > 0)

    later = []
    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.02)
    assert not order
    go.set()
    thread.join(LONGEST)
    assert order == [True, False] and later[0].result(LONGEST)
    assert speaker.drain(LONGEST) and speaker.load().cache == 0
    assert speaker.submit(work()).result(LONGEST)
    speaker.close()
    assert speaker.drain(0)
    with pytest.raises(Refused, match="closed"):
        speaker.submit(work())


def resident():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def growth(speaker, first, more):
    """Resident bytes after `first` requests, and after `more` further ones."""
    dice, sizes = random.Random(0), []
    for count in (first, more):
        for start in range(0, count, 20):
            futures = [speaker.submit(work(dice)) for _ in range(min(20, count - start))]
            for future in futures:
                future.result(LONGEST)
        sizes.append(resident())
    return sizes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("first", "more"), [(40, 120), pytest.param(1000, 9000, marks=pytest.mark.nightly)])
def test_memory_stays(engine, first, more):
    speaker = Speaker(engine, max_rows=16)
    before, after = growth(speaker, first, more)
    assert after <= 1.05 * before
    assert speaker.load().rows <= 16 and speaker.load().answered == first + more
    speaker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_control_arm_of_memory(engine, monkeypatch):
    """A thousandth of the process per request is seen."""
    over, leak, size = Live._over, [], resident() // 1000

    def leaking(self, group, ended, **how):
        leak.append(torch.ones(size // 4))
        over(self, group, ended, **how)

    monkeypatch.setattr(Live, "_over", leaking)
    speaker = Speaker(engine, max_rows=16)
    before, after = growth(speaker, 20, 100)
    assert after > 1.05 * before
    speaker.close()
