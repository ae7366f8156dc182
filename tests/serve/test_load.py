"""Many clients at once, on loopback, so many requests and seconds at most: nothing lost, nothing twice."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time

import psutil
import pytest

import unfreeze
from tests.serve import clients
from tests.serve.clients import SECONDS, Load, loaded, request
from tests.serve.fakes import FakeSpeaker, until
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Speech

NUMBER = re.compile(r"number (\d+)\.")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(unfreeze.TINY_K2)


def number_of(tokenizer):
    """-> reply(work): the answer is "is" and the number in the prompt."""

    def reply(work):
        number = NUMBER.findall(tokenizer.decode(work.prompt))[-1]
        return tokenizer.encode(f"is {number}", specials=False)

    return reply


def fake(tokenizer, reply, **options):
    return FakeSpeaker(reply, lambda id: tokenizer.decode([id]), **options)


def serving(tokenizer, speaker):
    return Endpoint().serve(Router(speaker, tokenizer, "fake", Speech(tokenizer, 4096)))


def at_once(endpoint, numbers, count, seconds=SECONDS):
    """Send a request for each number, `count` at a time, from a process of its own."""
    words = [sys.executable, clients.__file__, endpoint.port, count, seconds]
    done = subprocess.run(
        list(map(str, words)),
        input=json.dumps(list(numbers)),
        capture_output=True,
        text=True,
        timeout=seconds + 30,
    )
    assert done.returncode == 0, done.stderr
    return Load.read(done.stdout)


def lost_or_twice(load, numbers):
    """Numbers without exactly one answer of their own, of those that were not refused."""
    wrong = [n for n, texts in load.answers.items() if texts != [f"is {n}"]]
    missing = len(set(numbers)) - len(load.answers) - load.statuses[429]
    return wrong + ["lost"] * missing


def test_300_requests_at_once_are_answered_once_each_or_told_when_to_come_back(tokenizer):
    speaker = fake(tokenizer, number_of(tokenizer), rows=64, max_wait=128, pace=0.01)
    endpoint = serving(tokenizer, speaker)
    numbers = range(10_000, 10_300)
    load = at_once(endpoint, numbers, 300)
    assert not lost_or_twice(load, numbers) and not load.bare
    assert load.statuses[200] >= 128 and load.statuses[200] + load.statuses[429] == 300
    metrics = endpoint.service.metrics
    assert until(lambda: not endpoint.service.gate.visits)
    assert (
        metrics.outcomes["answered"] == load.statuses[200] and metrics.outcomes["busy"] == load.statuses[429]
    )
    assert metrics.waiting == metrics.running == 0
    endpoint.close()


@pytest.mark.parametrize("fault", ["another's answer", "a request that is lost"])
def test_control_arm_a_planted_fault_is_seen(tokenizer, fault):
    honest, before = number_of(tokenizer), []

    def reply(work):
        before.append(honest(work))
        return before[-2] if fault == "another's answer" and len(before) == 7 else before[-1]

    endpoint = serving(tokenizer, fake(tokenizer, reply))
    numbers = range(10_000, 10_020)
    load = at_once(endpoint, numbers, 4)
    if fault == "a request that is lost":
        del load.answers[10_003]
    assert lost_or_twice(load, numbers)
    endpoint.close()


def grown(endpoint, first, then, seconds=SECONDS):
    """Share by which this process has grown between request `first` and `then`."""
    process = psutil.Process(os.getpid())
    at_once(endpoint, range(first), 16, seconds)
    before = process.memory_info().rss
    at_once(endpoint, range(first, then), 16, seconds)
    return process.memory_info().rss / before - 1


def test_memory_does_not_grow_with_requests(tokenizer):
    endpoint = serving(tokenizer, fake(tokenizer, number_of(tokenizer)))
    assert grown(endpoint, 100, 300) <= 0.05
    assert until(lambda: not endpoint.service.gate.visits)
    endpoint.close()


@pytest.mark.nightly
def test_memory_grows_at_most_5_percent_between_request_1000_and_10000(tokenizer):
    endpoint = serving(tokenizer, fake(tokenizer, number_of(tokenizer)))
    share = grown(endpoint, 1000, 10_000, seconds=900)
    print(f"grown by {share:.2%}")
    assert share <= 0.05
    endpoint.close()


def test_control_arm_a_leak_is_seen(tokenizer):
    kept, honest, size = [], number_of(tokenizer), psutil.Process().memory_info().rss // 1500

    def reply(work):
        kept.append(bytearray(os.urandom(1)) * size)  # of each request
        return honest(work)

    endpoint = serving(tokenizer, fake(tokenizer, reply))
    assert grown(endpoint, 20, 220) > 0.05
    endpoint.close()


def test_who_leaves_frees_a_row(tokenizer):
    """64 rows are held by clients that leave in the middle."""
    speaker = fake(tokenizer, lambda work: [65] * 10_000, rows=64, pace=0.005)
    endpoint = serving(tokenizer, speaker)

    async def leave(stream):
        _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(request(1, max_tokens=4000, stream=stream))
        await all_run()
        writer.close()

    async def all_run():
        async with asyncio.timeout(SECONDS):
            while speaker.most_running < 64:
                await asyncio.sleep(0.01)

    async def all_leave():
        await asyncio.gather(*(leave(i % 2 == 0) for i in range(64)))

    asyncio.run(all_leave())
    assert speaker.most_running == 64
    assert until(lambda: not speaker.running) and speaker.freed == 64
    assert until(lambda: endpoint.service.metrics.outcomes["gone"] == 64)

    # control arm: one that stays keeps its row
    async def stay():
        _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(request(1, max_tokens=4000))
        async with asyncio.timeout(SECONDS):
            while not speaker.running:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(speaker.running) == 1
        writer.close()

    asyncio.run(stay())
    assert until(lambda: not speaker.running)
    endpoint.close()


def test_readers_of_a_byte_a_time_hold_nobody(tokenizer):
    """20 streams that nobody reads; other clients are answered meanwhile, and each is done with."""
    reply = number_of(tokenizer)
    speaker = fake(tokenizer, lambda work: [65] * 400 if work.most > 100 else reply(work), rows=16)
    endpoint = serving(tokenizer, speaker)

    async def slow():
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(request(1, max_tokens=4000, stream=True))
        for _ in range(20):
            await reader.read(1)
            await asyncio.sleep(0.02)
        writer.transport.abort()

    async def both():
        readers = [asyncio.ensure_future(slow()) for _ in range(20)]
        load, begin = Load(), time.monotonic()
        await loaded(endpoint.port, range(5, 25), 2, load)
        assert load.statuses == {200: 20} and time.monotonic() - begin < SECONDS
        await asyncio.gather(*readers)

    asyncio.run(both())
    assert until(lambda: not speaker.running and not endpoint.service.gate.visits)
    endpoint.close()


@pytest.mark.nightly
def test_1500_requests_at_once_to_the_model(tokenizer):
    """tiny-k2: every answer is the one that its request gets alone."""
    from unfreeze.serve.speaker import Speaker

    model = unfreeze.load(unfreeze.TINY_K2, dtype="float32")
    endpoint = serving(model.tokenizer, Speaker(model.engine, max_rows=32, max_wait=1500))
    kinds = 25
    alone = at_once(endpoint, range(kinds), 1)
    order = [n % kinds for n in range(1500)]
    random.Random(0).shuffle(order)
    load = at_once(endpoint, order, 1500, seconds=900)
    assert load.statuses == {200: 1500}
    assert all(set(texts) == set(alone.answers[n]) for n, texts in load.answers.items())
    endpoint.close()
