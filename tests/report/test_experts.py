"""M3: experts that are dead or overloaded are said while the run goes on, and the pictures over time are the
events' numbers."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest

from unfreeze.core.events import EventLog
from unfreeze.report.events import read_events, warnings
from unfreeze.report.experts import ExpertWatch, experts_section
from unfreeze.report.run import read_run


def watched(
    folder: Path, counts: list[list[int]], tokens: int = 1000, watch: bool = True
) -> list[tuple[int, str]]:
    """The warnings of a run whose layer 3 has these tokens per expert, one list per step."""
    log = EventLog(folder / "events.jsonl", (ExpertWatch(),) if watch else ())
    for step, counts_E in enumerate(counts, start=1):
        log.emit(
            "train",
            step,
            loss=1.0,
            grad_norm=1.0,
            tokens=tokens,
            seconds=1.0,
            expert_load={"3": counts_E, "1": [tokens] * len(counts_E)},
        )
    return warnings(read_events(folder / "events.jsonl"))


def test_a_dead_expert_is_said_once_with_layer_steps_and_remedy(tmp_path: Path):
    # 500 each if even: judged after 2, 4, 6, 8 steps, said at the first
    said = watched(tmp_path, [[500, 0, 1000, 500]] * 9)
    assert said == [
        (
            2,
            (
                "expert load: layer 3: 1 of 4 experts got no token in steps 1 to 2 and learn nothing (1; the"
                " fair share is 1,000 tokens). Broader data or, in pretrain, a higher experts.balance_loss"
                " reaches them, as does balance_rate where routers have a bias"
            ),
        )
    ]


def test_an_overloaded_expert_is_said(tmp_path: Path):
    counts_E = [600] + [40] * 15  # top-1 of 16: 600 + 15 * 40 = 1,200 tokens, half of them in expert 0
    assert watched(tmp_path, [counts_E] * 14, tokens=1200) == []  # exactly half: not more than half
    counts_E[0] += 1
    (said,) = watched(tmp_path / "more", [counts_E] * 14, tokens=1201)
    assert said == (
        14,
        (
            "expert load: layer 3: expert 0 got 50% of all tokens in steps 1 to 14 (the fair share is 6%),"
            " so the others learn less. In pretrain a higher experts.balance_loss spreads them, as"
            " does balance_rate where routers have a bias"
        ),
    )


def test_control_arm_without_the_watch_a_dead_expert_is_silent(tmp_path: Path):
    assert watched(tmp_path, [[500, 0, 1000, 500]] * 9, watch=False) == []


@pytest.mark.parametrize(
    "counts",
    [
        [[2, 0, 4, 2]] * 200,  # few tokens: 400 if even, less than is judged
        [[1000, 0, 1000, 0], [0, 1000, 0, 1000]] * 4,  # each step misses experts, no stretch does
        [[900, 1, 600, 499]] * 9,  # uneven, but every expert learns
        [[1400, 200, 200, 200]] * 9,  # 70 % of a top-2 choice among four: the even share is a half already
    ],
)
def test_no_false_alarm(tmp_path: Path, counts: list[list[int]]):
    assert watched(tmp_path, counts) == []


def test_a_dense_run_and_other_events_say_nothing():
    assert (
        ExpertWatch()({"kind": "train", "step": 1, "tokens": 10}) is None
        and ExpertWatch()({"kind": "save", "step": 1}) is None
    )


def pixels(page: str, alt: str) -> list[list[tuple[int, ...]]]:
    """The rows of the first bitmap whose name begins with `alt`, decoded by Pillow."""
    from PIL import Image

    svg = next(part for part in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if f'aria-label="{alt}' in part)
    data = re.search(r'base64,([^"]+)', svg)
    assert data
    image = Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGBA")
    return [[image.getpixel((x, y)) for x in range(image.width)] for y in range(image.height)]


@pytest.fixture
def page(tmp_path: Path) -> str:
    watched(tmp_path, [[20, 20, 20, 20], [40, 0, 20, 20], [80, 0, 0, 0]], watch=False)
    (tmp_path / "resolved_config.json").write_text(json.dumps({"clip": 1.0}))
    return experts_section(read_run(tmp_path))


def test_violation_over_time_is_drawn_from_the_events(page: str):
    """Layer 3: 0, 1 and 3 in the three steps; full colour is 2. Layer 1 is even throughout."""
    assert [[pixel[3] for pixel in row] for row in pixels(page, "Max violation, 2 layers down")] == [
        [0, 0, 0],
        [0, 128, 255],
    ]
    assert "mean of the layers 0.00 at step 1, 1.50 at step 3." in page


def test_the_busiest_layers_experts_over_time(page: str):
    """Four experts down, three steps across: load over three times the mean of 20; an expert without a token
    where 10 or more were due is red."""
    rows = pixels(page, "Tokens per expert of layer 3")
    assert [[pixel[3] if pixel[0] != 0xD0 else "dead" for pixel in row] for row in rows] == [
        [85, 170, 255],
        [85, "dead", "dead"],
        [85, 85, "dead"],
        [85, 85, "dead"],
    ]


@pytest.mark.parametrize(
    "counts, even",
    [
        ([[25, 30, 20, 25]] * 3, True),
        ([[60, 10, 15, 15]] * 3, False),  # the busiest has 2.4 times the mean
        ([[34, 33, 33, 0]] * 3, False),  # one is never used
    ],
)
def test_even_experts_are_folded_away(tmp_path: Path, counts: list[list[int]], even: bool):
    log = EventLog(tmp_path / "events.jsonl")
    for step, counts_E in enumerate(counts, start=1):
        log.emit("train", step, loss=1.0, grad_norm=1.0, tokens=50, seconds=1.0, expert_load={"1": counts_E})
    section = experts_section(read_run(tmp_path))
    shown = re.sub(r"<details>.*</details>", "", section, flags=re.DOTALL)
    assert ("<figure" in section) and ("<figure" not in shown) == even and ("Even. " in shown) == even


def test_a_real_run_carries_balance_and_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """tiny-k2 with a router that cannot choose expert 0 of layer 2: the run itself says so, and its events
    count one dead expert in each step."""
    import torch

    from unfreeze import cli
    from unfreeze.commands.demo import TINY_K2
    from unfreeze.models.blocks.routers import Router

    choose = Router.choose

    def never_the_first(self: Router, scores_TE: torch.Tensor) -> torch.Tensor:
        hidden = scores_TE.clone()
        hidden[:, 0] = -1e9
        return choose(self, hidden)

    monkeypatch.setattr(Router, "choose", never_the_first)
    monkeypatch.setattr("unfreeze.job.end.folder.ExpertWatch", lambda: ExpertWatch(expected=20))
    (tmp_path / "chat.jsonl").write_text(
        (json.dumps({"text": "Paris is the capital of France. The sky is blue."}) + "\n") * 20
    )
    flags = [
        "--model",
        TINY_K2,
        "--data",
        tmp_path / "chat.jsonl",
        "--out",
        tmp_path / "run",
        "--steps",
        2,
        "--watch.samples",
        0,
        "--optimizer.warmup",
        0,
        "--tokens-per-step",
        128,
        "--lora.rank",
        1,
        "--lora.targets",
        "attention",
    ]
    assert cli.main(["sft", "--quiet", *map(str, flags)]) == 0
    events = read_events(tmp_path / "run" / "events.jsonl")
    trained = [event for event in events if event["kind"] == "train"]
    assert all(
        event["expert_balance"][layer]["dead"] >= 1 for event in trained for layer in event["expert_load"]
    )
    assert all(event["expert_load"][layer][0] == 0 for event in trained for layer in event["expert_load"])
    assert any(
        words.startswith("expert load: layer 1: ") and " experts got no token in steps " in words
        for _, words in warnings(events)
    )
    assert "got no token in steps" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
