"""rollouts.html and the section of report.html: numbers equal the files, text is text, ten thousand answers are small."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from tests.report.reader import Page
from tests.report.rollouts.fake import fake_run, fake_step
from unfreeze.commands.report import watch
from unfreeze.report.html import summary_lines, write_report
from unfreeze.report.rollouts import Answer, Rollouts
from unfreeze.report.rollouts.numbers import numbers_of

HOSTILE = "</script><script>alert(1)</script> & \"'<img src=x onerror=alert(1)>\u2028\x1b[31m\x00\ud800"


def page(run: Path) -> tuple[str, Page]:
    write_report(run)
    source = (run / "rollouts.html").read_text(encoding="utf-8")
    return source, Page(source)


def steps_of(source: str) -> list[list[float | None]]:
    found = re.search(r'data-steps="([^"]*)"', source)
    assert found
    return json.loads(unescape(found[1]))


def test_the_page_has_the_numbers_of_each_step_and_its_pictures(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=12)
    source, parsed = page(run)
    assert parsed.scripts == 0 and parsed.open == [] and len(parsed.allowed) == 1
    assert parsed.external == ["report.html"]
    expected = []
    for step in range(1, 13):
        numbers = numbers_of(step, fake_step(step, skill=0.1 + 0.85 * step / 12))
        mean = numbers["reward"][1] / numbers["reward"][0]
        expected.append([step, 64, 8, numbers["without_signal"], pytest.approx(mean, rel=1e-5)])
    assert steps_of(source) == expected
    assert parsed.facts["Answers"].strip() == "768" and "in 12 steps" in parsed.texts
    assert parsed.facts["Mean reward"] == f"{expected[0][4].expected:.3f} → {expected[-1][4].expected:.3f}"
    failed = 24 / 768
    assert parsed.facts["Grading failed"].strip() == f"{100 * failed:.1f} %" and "24 answers" in parsed.texts
    titles = re.findall(r"<figcaption><strong>([^<]*)", source)
    assert titles == [
        "Mean reward",
        "Parts of the reward",
        "Groups without signal",
        "Tokens per answer",
        "Entropy",
        "KL to the model as it began",
        "Cut answers",
        "Grading failed",
        "Behaviours",
        "What the reward follows",
    ]


def test_the_page_may_load_its_data_and_nothing_else(tmp_path: Path):
    _, parsed = page(fake_run(tmp_path / "run", steps=1))
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[\w+/=]+' 'strict-dynamic'; style-src 'unsafe-inline';"
        r" img-src data:; base-uri 'none'; form-action 'none'",
        parsed.policy,
    )
    (script,) = parsed.allowed
    assert not re.search(
        r"fetch|XMLHttp|WebSocket|eval\(|innerHTML|outerHTML|insertAdjacent|document\.write|Function\("
        r"|https?://(?!www.w3.org/2000/svg)",
        script,
    )
    assert re.findall(r"\.(?:src|href) = (.*);", script) == ["file"]  # rollouts/step-000012.js


def hostile(answer: Answer) -> Answer:
    texts = {name: HOSTILE for name in ("prompt", "text", "stop", "outcome", "message")}
    return {
        **answer,
        **texts,
        "pieces": [HOSTILE] * 3,
        "parts": {HOSTILE: 0.5},
        "turns": [[HOSTILE, HOSTILE]],
    }


def test_hostile_text_stays_out_of_the_page_or_is_escaped(tmp_path: Path):
    rows = {1: [hostile(answer) for answer in fake_step(1)], 2: [hostile(answer) for answer in fake_step(2)]}
    run = fake_run(tmp_path / "run", rows=rows)
    source, parsed = page(run)
    report = Page((run / "report.html").read_text(encoding="utf-8"))
    assert parsed.scripts == report.scripts == 0 and source.count("<script") == 1
    assert parsed.open == report.open == [] and "alert(1)" in " ".join(parsed.texts)  # a part's name, as text
    # control arm: the same text unescaped is found
    assert Page(source.replace("</main>", HOSTILE.removeprefix("</script>") + "</main>")).scripts


@pytest.mark.parametrize("answers", [100, 1000])
def test_ten_thousand_answers_add_nothing_to_the_page(tmp_path: Path, answers: int):
    """Counted, not timed: bytes and elements of the page before a step is opened; answers stay in their files."""
    rows: dict[int, list[Answer]] = {}
    for step in range(1, 11):
        plain: Answer = {
            "step": step,
            "group": 0,
            "answer": 0,
            "prompt": "p",
            "text": "word " * 20,
            "stop": "end",
        }
        graded = {"outcome": "ok", "message": "", "parts": {"value": 0.5}, "advantage": 0.1}
        rows[step] = [
            {**plain, **graded, "group": i // 10, "answer": i % 10, "reward": (i % 7) / 7}
            for i in range(answers)
        ]
    source, _ = page(fake_run(tmp_path / "run", rows=rows))
    assert sum(step[1] or 0 for step in steps_of(source)) == 10 * answers
    body = source.split("<body>")[1].split("<script>")[0]
    assert len(source.encode()) < 100_000 and len(body) < 30_000
    assert len(re.findall(r"<[a-z]", body)) < 450
    assert "word word" not in source


def test_the_index_grows_by_a_few_bytes_a_step(tmp_path: Path):
    """5,000 steps: 25 bytes each, and pictures of at most 1,200 points."""
    from unfreeze.report.rollouts.copies import Step
    from unfreeze.report.rollouts.page import rollouts_page
    from unfreeze.report.run import read_run

    run = read_run(fake_run(tmp_path / "run", steps=1))
    numbers = numbers_of(1, fake_step(1))
    steps = [Step({**numbers, "step": i}, {}, 0, "") for i in range(1, 5001)]
    source = rollouts_page(run, steps)
    index = json.dumps(steps_of(source), separators=(",", ":"))
    assert len(index) < 30 * 5000 and len(source) < 1_000_000


def test_the_report_leads_to_the_page_and_says_the_numbers(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=12)
    write_report(run)
    source = (run / "report.html").read_text(encoding="utf-8")
    assert '<a href="rollouts.html">' in source and "<h2>Rollouts</h2>" in source
    parsed = Page(source)
    assert parsed.facts["Answers"].split()[0] == "768" and parsed.scripts == 0
    (line,) = [line for line in summary_lines(run) if line.strip().startswith("Rollouts")]
    assert line.split("Rollouts")[1].strip().startswith("768 answers in 12 steps, mean reward 0.")


def test_a_run_without_rollouts_has_neither_section_nor_page(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=1)
    for path in (run / "rollouts").iterdir():
        path.unlink()
    (run / "rollouts").rmdir()
    write_report(run)
    assert not (run / "rollouts.html").exists()
    assert "ollouts" not in (run / "report.html").read_text(encoding="utf-8") + "\n".join(summary_lines(run))


def test_before_the_first_step_both_pages_say_so(tmp_path: Path):
    run = fake_run(tmp_path / "run", rows={})
    source, parsed = page(run)
    words = "No rollouts yet: a step is written when its answers have been graded."
    assert words in parsed.texts and steps_of(source) == [] and "<figure" not in source
    assert words in Page((run / "report.html").read_text()).texts


def test_one_step_no_parts_all_failed(tmp_path: Path):
    rows: list[Answer] = [
        {"step": 1, "group": 0, "answer": i, "text": "a", "reward": None, "outcome": "error"}
        for i in range(4)
    ]
    source, parsed = page(fake_run(tmp_path / "run", rows={1: rows}))
    assert steps_of(source) == [[1, 4, 1, 1, None]]
    assert "Mean reward" not in parsed.facts and "Parts of the reward" not in source
    assert parsed.facts["Grading failed"].strip() == "100.0 %" and "4 answers" in parsed.texts
    assert parsed.facts["Groups without signal"].strip() == "100 %" and "1 of 1" in parsed.texts


def test_damage_and_what_was_left_out_are_on_the_page(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=2)
    (run / "rollouts" / "step-000001.jsonl.gz").write_bytes(b"cut")
    Rollouts(run, limit=1).write(3, fake_step(3))
    _, parsed = page(run)
    said = " ".join(parsed.texts)
    assert "step-000001.jsonl.gz is cut or damaged: 0 answers could be read." in said
    assert "Left out from step 3 on, for the limit of the folder: 64 answers." in said


def test_a_reward_that_follows_length_is_an_alarm_on_both_pages(tmp_path: Path):
    rows: dict[int, list[Answer]] = {
        step: [
            {
                "step": step,
                "group": i // 8,
                "answer": i % 8,
                "text": "w " * (i % 8 + 1),
                "reward": step + i % 8 / 8,
            }
            for i in range(32)
        ]
        for step in range(1, 7)
    }
    run = fake_run(tmp_path / "run", rows=rows)
    source, _ = page(run)
    alarm = "The reward follows length (r = +1.00 within groups, last 3 steps) and rises"
    assert f'<p class="verdict doubt">{alarm}' in source
    assert f'<p class="look">{alarm}' in (run / "report.html").read_text(encoding="utf-8")


def test_a_watched_run_is_followed_until_it_ends(tmp_path: Path):
    """--watch writes the page anew with each new event; it reloads itself while no step is open."""
    run = fake_run(tmp_path / "run", steps=2)
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(events[:-1]), encoding="utf-8")
    watch(run, quiet=True, seconds=0.0)  # no process writes it: one pass
    source = (run / "rollouts.html").read_text(encoding="utf-8")
    assert 'data-reload="4"' in source and 'http-equiv="refresh"' not in source
    (run / "events.jsonl").write_text("".join(events), encoding="utf-8")
    assert 'data-reload="0"' in page(run)[0]


def test_the_same_folder_gives_the_same_page(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=3)
    assert page(run)[0] == page(run)[0] and not list(run.rglob("*.tmp"))


def test_cut_answers_that_are_left_out_are_no_failures_of_grading():
    from unfreeze.report.rollouts.trends import ungraded

    numbers = {"answers": 10, "outcomes": {"ok": 6, "cut": 3, "error": 1}}
    assert ungraded(numbers) == 1
