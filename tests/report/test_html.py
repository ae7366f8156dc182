"""report.html: self-contained, escaped, complete, and equal to the events. html.parser is the reader that
decides.

The run is made here: 40 steps, every kind of event, numbers that are easy to find again in the page.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.reader import Page
from unfreeze.core.errors import DataError
from unfreeze.report import page as frame
from unfreeze.report.html import flatten, summary_lines, write_report

HOSTILE = "<script>alert('x')</script> & \"quoted\" <img src=https://example.invalid/x.png>"
GROUPS = {
    "attention": {
        "parameters": 412_672,
        "trained": True,
        "sites": 9,
        "sites_reached": 8,
        "sites_moved": 7,
        "grad_norm": 0.412,
        "moved": 0.0312,
        "output_change": 0.00211,
    },
    "routed experts": {
        "parameters": 1_966_080,
        "trained": True,
        "grad_norm": 0.0871,
        "moved": 0.0298,
        "output_change": 0.00143,
    },
    "router": {"parameters": 8_192, "trained": False, "grad_norm": None, "moved": 0.0, "output_change": 0.0},
}
EXCEPTIONS = [
    {"group": "attention", "sites": "model.layers.1.self_attn.q_b_proj", "count": 1, "why": "no gradient"},
    {
        "group": "routed experts",
        "sites": "model.layers.1.mlp.experts.0-7.down_proj",
        "count": 8,
        "why": "gradient below 1e-8, no movement",
    },
]


def train_event(step: int, experts: bool = True) -> dict[str, Any]:
    event = {
        "kind": "train",
        "step": step,
        "time": 1_790_000_000.0 + 2 * step,
        "loss": 0.35 + 2.5 * math.exp(-step / 8),
        "tokens": 2048 + step,
        "seconds": 2.0,
        "learning_rate": 1e-3 / step,
        "grad_norm": 1.0 + 1.0 / step,
        "peak_bytes": 400_000_000 + step,
        "supervised_tokens": 900 + step,
    }
    return event | ({"expert_load": {"10": [5, 0, 7, 4], "2": [4, 4, 4, 4]}} if experts else {})


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": 1_790_000_000.0 + 2 * step, **fields}


def events(steps: int = 40) -> list[dict[str, Any]]:
    return [
        event("plan", 0, terms={"base": 4_194_304, "adapter": 2_097_152}),
        event(
            "data",
            0,
            rows=21,
            examples=18,
            tokens=9000,
            supervised=3000,
            supervised_fraction=1 / 3,
            longest=512,
            truncated=4,
            dropped=2,
            bad=1,
            shapes={"messages": 21},
            notes={HOSTILE: 5},
            listed=[{"row": 7, "reason": HOSTILE}],
            summary="21 rows, 4 truncated, 2 dropped, 1 bad",
        ),
        event("load", 0, bytes=7_340_032, seconds=0.01, expanded_bytes=24_000_000),
        event("start", 0, steps=steps, model="tiny-k2", data="chat.jsonl", resumed=False),
        event("sample", 0, when="before", prompt=HOSTILE, text="Plain."),
        *(train_event(step) for step in range(1, steps + 1)),
        event("receipt", 1, groups=GROUPS, exceptions=EXCEPTIONS),
        event("eval", steps, loss=0.4321, style=0.987),
        event("warning", 3, message="row 17: 0 of 512 tokens supervised"),
        event("sample", steps, when="after", prompt=HOSTILE, text=f"Hmm. {HOSTILE}"),
        event("end", steps, reason="done", steps=steps, tokens_per_second=1077.3),
    ]


def write_run(folder: Path, lines: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if config is not None:
        (folder / "resolved_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "yoda", events(), {"model": "tiny-k2", "lora": {"rank": 16, "note": HOSTILE}})


def page(run_dir: Path) -> tuple[str, Page]:
    source = write_report(run_dir).read_text(encoding="utf-8")
    return source, Page(source)


def test_nothing_external_and_one_script_named_by_its_hash(run_dir: Path):
    source, parsed = page(run_dir)
    assert parsed.external == [] and parsed.scripts == 0 and parsed.open == [] and len(parsed.allowed) == 1
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'unsafe-inline'; img-src data:;"
        r" base-uri 'none'; form-action 'none'",
        parsed.policy,
    )
    script = parsed.allowed[0]
    assert script.count("\n") <= 120 and not re.search(
        r"fetch|XMLHttp|import|eval|innerHTML|https?://(?!www.w3.org/2000/svg)", script
    )
    # control arms: each way out, planted, is found
    for planted in (
        '<img src="https://example.invalid/x.png">',
        '<link rel="stylesheet" href="//example.invalid/x.css">',
        "<style>@import 'x.css';</style>",
        '<p style="background: url(http://example.invalid)"></p>',
        '<svg><image xlink:href="x.png"/></svg>',
    ):
        assert Page(source.replace("</main>", planted + "</main>")).external, planted
    for planted in ("<script></script>", '<p onclick="x()"></p>', "<iframe></iframe>"):
        assert Page(source.replace("</main>", planted + "</main>")).scripts, planted
    assert Page(
        source.replace('"use strict";', '"use strict"; x();')
    ).scripts  # the script itself changed, its hash not


def test_hostile_text_is_shown_and_never_obeyed(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    source, parsed = page(run_dir)
    assert source.count("<script") == 1 and parsed.scripts == 0
    # prompt, config, a note and a reason of the data; the answer
    assert parsed.texts.count(HOSTILE) == 4 and f"Hmm. {HOSTILE}" in parsed.texts
    # control arm: the guard removed
    monkeypatch.setattr(frame, "ENVIRONMENT", frame.environment(autoescape=False))
    with pytest.raises(AssertionError):
        _, unsafe = page(run_dir)
        assert unsafe.scripts == 0 and unsafe.external == []


def everywhere(value: Any) -> Any:
    """The value with every text in it, and every name that the run made up, hostile; kinds and what the page
    reads by name stay."""
    if isinstance(value, dict):
        return {
            HOSTILE if key in ("messages", "attention", "base", "style") else key: (
                item if key in ("kind", "when", "reason") else everywhere(item)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [everywhere(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_whatever_text_is_hostile_nothing_of_it_runs(tmp_path: Path):
    config = {
        "recipe": HOSTILE,
        "model": HOSTILE,
        "data": [HOSTILE],
        HOSTILE: HOSTILE,
        "on_spike": HOSTILE,
        "track": [HOSTILE],
        "dtype": HOSTILE,
        "effective": {"given": ["model"], "versions": {HOSTILE: HOSTILE}, "machine": HOSTILE},
    }
    _, parsed = page(write_run(tmp_path / "x", [everywhere(event) for event in events(3)], config))
    assert parsed.scripts == 0 and parsed.external == [] and parsed.open == [] and len(parsed.allowed) == 1
    assert sum(HOSTILE in words for words in parsed.texts) > 20


def test_control_characters_and_half_surrogates_do_not_break_the_page(tmp_path: Path):
    lines = [
        *events(3),
        {"kind": "sample", "step": 3, "when": "after", "prompt": "p", "text": "a\x00b\x1bc \ud800 d\te\n"},
    ]
    source, _ = page(write_run(tmp_path / "r", lines))
    assert "a\ufffdb\ufffdc ? d\te\n" in source


def test_step_table_and_receipt_equal_the_events(run_dir: Path):
    _, parsed = page(run_dir)
    head, *rows = parsed.tables["Numbers of each step"]
    assert head[:3] == ["step", "loss", "learning rate"] and len(rows) == 40
    for row in rows:
        event = train_event(int(row[0]))
        values = [float(cell.replace(",", "")) for cell in row[1:]]
        fields = (
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens",
            "supervised_tokens",
            "seconds",
            "peak_bytes",
        )
        # shown with at least three significant figures
        assert values == pytest.approx([event[field] for field in fields], rel=5e-3)
        assert values[3:] == [event[field] for field in fields[3:]]
    receipt = {row[0]: row[1:] for row in parsed.tables["Receipt per module group"][1:]}
    assert receipt.keys() == GROUPS.keys()
    for group, (parameters, trained, matrices, *sizes) in receipt.items():
        assert matrices == ("7 of 8" if group == "attention" else "–")
        assert int(parameters.replace(",", "")) == GROUPS[group]["parameters"] and trained == (
            "yes" if GROUPS[group]["trained"] else "no"
        )
        expected = [GROUPS[group][field] for field in ("grad_norm", "moved", "output_change")]
        assert [None if cell == "–" else float(cell) for cell in sizes] == pytest.approx(expected)


def test_the_account_of_the_data_is_in_the_page_and_in_the_summary(run_dir: Path):
    _, parsed = page(run_dir)
    data = parsed.facts
    assert (
        data["rows in the file"],
        data["rows truncated"],
        data["rows dropped"],
        data["bad rows skipped"],
    ) == ("21", "4", "2", "1")
    assert data["supervised share"] == "33.3%" and data["rows as messages"] == "21"
    assert parsed.tables["Notes on the data"][1] == [HOSTILE, "5"] and parsed.tables["Rows left out"][1] == [
        "row 7",
        HOSTILE,
    ]
    assert any("21 rows, 4 truncated, 2 dropped, 1 bad" in line for line in summary_lines(run_dir))


def test_header_captions_and_expert_numbers_equal_the_events(run_dir: Path):
    source, parsed = page(run_dir)
    first, final = train_event(1)["loss"], train_event(40)["loss"]
    assert f"{first:.3f} → {final:.3f}" in parsed.texts
    load = "7.3 MB at 0.73 GB/s (24.0 MB unpacked)"
    for words in (
        "40 of 40",
        "1 min 20 s",
        "1,034",
        "381.5 MiB",
        "finished",
        "tiny-k2",
        "chat.jsonl",
        "2.38 M",
        load,
    ):
        assert words in map(str.strip, parsed.texts), words
    assert (
        sum(event["tokens"] for event in events() if event["kind"] == "train") == 82_740
        and "82.7 K" in parsed.texts
    )
    assert f'aria-label="Training loss per step: {first:.3f} at step 1, {final:.3f} at step 40' in source
    # layer 10: loads 5, 0, 7, 4 in each of 40 steps: mean 4, busiest 7 -> 7/4 - 1; p = 5/16, 7/16, 4/16:
    # entropy 1.0717 of ln 4 = 1.3863
    assert parsed.tables["Expert load per layer"][1:] == [
        ["2", "640", "0.00", "1.000", "0", "0.00", "0.0"],
        ["10", "640", "0.75", "0.773", "1", "0.75", "1.0"],
    ]
    assert "at most 1.75, in layer 10. 1 of 8 experts got no token." in source
    assert parsed.tables["Evaluations"] == [
        ["what", "unit", "first", "last", "best"],
        ["held-out loss", "nats per token", "–", "0.4321", "–"],
        ["style: answers that speak like Yoda", "%", "–", "0.987", "–"],
    ]
    assert parsed.tables["Resolved config"][1:] == [
        ["model", "tiny-k2"],
        ["lora.rank", "16"],
        ["lora.note", HOSTILE],
    ]
    assert parsed.tables["Warnings of the run"][1:] == [["step 3", "row 17: 0 of 512 tokens supervised"]]


@pytest.mark.parametrize("better, marked", [(True, False), (False, True)])
def test_a_sentence_that_does_not_say_learnt_is_marked(tmp_path: Path, better: bool, marked: bool):
    """An amber rule beside it; none beside a success, or a run that still goes on."""
    losses = range(40, 0, -1) if better else range(1, 41)
    receipt = {"attention": {"parameters": 9, "trained": 9, "moved": 0.1, "output_change": 9.0}}
    lines = [event("receipt", 1, groups=receipt)]
    lines += [event("train", step, loss=float(loss)) for step, loss in enumerate(losses, start=1)]
    done = [*lines, event("end", 40, reason="done")]
    source, _ = page(write_run(tmp_path / "r", done))
    assert ('<p class="verdict doubt">' in source) == marked
    source, _ = page(write_run(tmp_path / "going on", lines))
    assert '<p class="verdict">' in source


def test_five_numbers_stand_on_top_and_the_others_under_details(tmp_path: Path):
    """Of pairs too, whose log-probabilities lie below zero."""
    beside = {"margin": 1.0, "logp_chosen": -9.0, "logp_rejected": -12.5, "tokens": 64, "seconds": 1.0}
    lines = [event("train", step, loss=2.0 / step, peak_bytes=2**20, **beside) for step in range(1, 9)]
    lines += [event("eval", step, loss=1.0) for step in (0, 8)]
    source, _ = page(write_run(tmp_path / "r", lines))
    top, details = (
        source.split("<h2>Result in numbers</h2>")[1].split("<figure")[0],
        source.split("<h2>Details</h2>")[1],
    )
    assert re.findall("<dt>([^<]*)</dt>", top) == [
        "Held\N{NON-BREAKING HYPHEN}out loss",
        "Loss",
        "Time",
        "Tokens per second",
        "Peak memory",
    ]
    assert "<dt>Margin of rewards</dt>" in details and "<dt>Tokens</dt>" in details
    assert (
        "Training loss by step, mean over pairs" in source
        and "<strong>Log-probability of chosen answers</strong>" in source
    )
    assert '<link rel="icon" href="data:image/svg+xml,' in source


def test_the_command_breaks_between_its_flags_and_copies_as_one_line(tmp_path: Path):
    run = write_run(tmp_path / "r", [event("train", 1, loss=1.0)])
    (run / "resolved_config.json").write_text('{"recipe": "sft", "model": "m", "epochs": 3, "data": "x--y"}')
    source, _ = page(run)
    (shown,) = re.findall(r'<pre class="command">(.*?)</pre>', source)
    parts = re.findall("<span>([^<]*)</span>", shown)
    assert parts == ["unfreeze sft", "--model m", "--epochs 3", "--data x--y", "--out runs/r-again"]
    assert re.sub("<[^>]*>", "", shown) == " ".join(parts)


def test_the_same_folder_gives_the_same_page(run_dir: Path):
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert not list(run_dir.glob("*.tmp"))


def test_receipt_and_plan_files_come_before_their_events(run_dir: Path):
    (run_dir / "receipt.json").write_text(
        json.dumps({"groups": {"only": {"parameters": 7, "trained": True, "moved": 0.0}}})
    )
    (run_dir / "plan.json").write_text(json.dumps({"lines": ["peak 1.0 GiB <b>"]}))
    source, parsed = page(run_dir)
    assert parsed.tables["Receipt per module group"][1][0] == "only" and "Did not move: only." in parsed.texts
    assert "peak 1.0 GiB <b>" in parsed.texts and 'class="bad"' in source


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_killed_dense_run_says_what_is_missing(tmp_path: Path, steps: int):
    lines = [
        {"kind": "start", "step": 0, "steps": 9, "model": "m", "data": "d"},
        *(train_event(step, experts=False) for step in range(1, steps + 1)),
    ]
    run_dir = write_run(tmp_path / "r", lines)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    _, parsed = page(run_dir)
    said = " ".join(parsed.texts)
    missing = ("No samples", "No receipt", "Not in the run folder: plan and resolved config")
    assert "Expert load" not in said  # a dense model has none
    for words in (*missing, f"unfinished: {steps} of 9 steps"):
        assert words in said
    assert ("No training step is in the events" in said) == (steps == 0)


def test_interrupted_run_says_so(tmp_path: Path):
    lines = [line for line in events() if line["kind"] != "end"]
    lines.append({"kind": "end", "step": 40, "reason": "interrupted", "steps": 40})
    next(line for line in lines if line["kind"] == "start")["steps"] = 60
    run_dir = write_run(tmp_path / "r", lines)
    assert "interrupted after step 40 of 60" in page(run_dir)[1].texts


def test_missing_fields_are_named_not_invented(tmp_path: Path):
    lines = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2)]
    _, parsed = page(write_run(tmp_path / "r", lines))
    assert "Not in the events: tokens per second, peak memory, learning rate, gradient norm." in parsed.texts
    assert parsed.tables["Numbers of each step"][1] == ["1", "1.0000", *["–"] * 6]


def test_long_run_stays_a_small_page(tmp_path: Path):
    lines = [train_event(step) for step in range(1, 5001)]
    source, parsed = page(write_run(tmp_path / "r", lines))
    shown = parsed.tables["Numbers of each step"][1:]
    assert len(shown) <= 202 and shown[-1][0] == "5,000" and len(source) < 400_000


def test_damaged_files_are_user_errors(run_dir: Path):
    (run_dir / "resolved_config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not JSON"):
        write_report(run_dir)
    (run_dir / "resolved_config.json").write_text("[]")
    with pytest.raises(DataError, match="holds a JSON list"):
        write_report(run_dir)


def test_summary_lines(run_dir: Path):
    lines = summary_lines(run_dir)
    assert lines[:2] == [
        "yoda: finished",
        "  tiny-k2 was trained on 18 conversations of chat.jsonl in 1 min 20 s of training: held-out loss 0.432, style 0.99 %.",
    ]
    joined = "\n".join(lines)
    losses = f"{train_event(1)['loss']:.3f} → {train_event(40)['loss']:.3f}"
    for words in (
        losses,
        "40 of 40",
        "Busiest expert: 1.75× its fair share (layer 10). 1 without a token.",
        "warning, step 3: row 17",
    ):
        assert words in joined


def test_flatten_spells_flags():
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, "x"], "e": None, "f": {}}) == {
        "a.b.c": "1",
        "d": '[1, "x"]',
        "e": "null",
        "f": "{}",
    }


def test_report_imports_neither_torch_nor_numpy(run_dir: Path):
    code = (
        "import sys; from unfreeze.report.html import write_report; import unfreeze.tracking.live;"
        f"write_report({str(run_dir)!r});"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules), 'too much is imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def huge(value: Any) -> Any:
    """The value with every number in it as large as the schema takes it; steps, times and expert counts
    stay."""
    if isinstance(value, dict):
        return {
            key: item if key in ("step", "time", "steps", "expert_load") else huge(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [huge(item) for item in value]
    return {int: 2**63 - 1, float: 1e300}.get(type(value), value)


def test_a_run_whose_numbers_are_the_largest_that_the_schema_takes_has_a_report(tmp_path: Path):
    run = write_run(tmp_path / "run", [huge(event) for event in events(30)])
    assert write_report(run).is_file() and summary_lines(run)
    beyond = write_run(tmp_path / "beyond", [train_event(1) | {"grad_norm": 1.7e308}])
    with pytest.raises(
        DataError, match=r"events\.jsonl line 1: train\.grad_norm is 1\.7e\+308: Input should be"
    ):
        write_report(beyond)


@pytest.mark.parametrize(
    "sources, words",
    [
        (("training data",), "The same prompts (from training data), answered"),
        (("your prompts", "training data"), "(from your prompts and training data), answered"),
        (("held-out data",), "(from held-out data), answered"),
        ((None,), "The same prompts, answered"),  # an older run did not say
    ],
)
def test_samples_say_where_their_prompts_are_from(
    tmp_path: Path, sources: tuple[str | None, ...], words: str
):
    samples = [
        {"kind": "sample", "step": 0, "when": when, "index": i, "prompt": f"p{i}", "text": "t"}
        | ({"source": source} if source else {})
        for when in ("before", "after")
        for i, source in enumerate(sources)
    ]
    assert words in write_report(write_run(tmp_path / "r", samples)).read_text()
