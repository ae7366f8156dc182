"""The page of rollouts in a browser, from the disk: steps load, keys work, planted text does nothing."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.rollouts.browser import PROGRAM, Browser, Tab
from tests.report.rollouts.fake import fake_run, fake_step
from unfreeze.report.html import write_report
from unfreeze.report.rollouts import Answer, Rollouts

pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs chromium or chrome on the PATH")
STEPS = 6


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = fake_run(tmp_path_factory.mktemp("runs") / "sums", steps=STEPS)
    write_report(run)
    return run


def shown(browser: Browser, run: Path, at: str = "", **screen: int | bool) -> Tab:
    tab = browser.open(run / "rollouts.html", at=at, **screen)  # type: ignore[arg-type]
    if at:
        tab.until("document.querySelector('#list')")
    return tab


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll('{selector}')].map((each) => each.textContent)")


def count(tab: Tab, selector: str) -> int:
    return tab.run(f"document.querySelectorAll('{selector}').length")


def mean(rows: list[Answer], group: int) -> float | None:
    rewards = [reward for each in rows if each["group"] == group and (reward := each["reward"]) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def test_a_step_is_loaded_from_its_file_when_it_is_opened(browser: Browser, run: Path):
    tab = shown(browser, run)
    assert count(tab, ".group") == 0 and tab.run("document.querySelectorAll('*').length") < 800
    tab.run("document.querySelector('.ways button').click()")
    tab.until("document.querySelector('#list .group')")
    rows = fake_step(STEPS, skill=0.95)
    means = sorted(mean(rows, group) or 0.0 for group in range(8))
    assert [float(text) for text in texts(tab, ".group .mean")] == pytest.approx(means, rel=1e-3)
    assert tab.run("document.getElementById('where').textContent") == f"step {STEPS} of {STEPS}"
    assert tab.faults == []


def test_a_group_shows_rewards_parts_stop_and_each_token(browser: Browser, run: Path):
    tab = shown(browser, run, at="#step=3&group=2&sort=row")
    rows = [each for each in fake_step(3, skill=0.1 + 0.85 / 2) if each["group"] == 2]
    assert count(tab, ".answer") == 8
    for place, answer in enumerate(rows):
        pieces = tab.run(
            f"[...document.querySelectorAll('.answer')[{place}].querySelectorAll('.tokens span')].map((e) => e.textContent)"
        )
        assert pieces == answer["pieces"]
        facts = tab.run(
            f"[...document.querySelectorAll('.answer')[{place}].querySelectorAll('dt, dd')].map((e) => e.textContent)"
        )
        known = dict(zip(facts[::2], facts[1::2], strict=True))
        assert float(known["reward"]) == pytest.approx(answer["reward"], rel=1e-3)
        assert known["stopped by"] == answer["stop"] and known["format"] == f"{answer['parts']['format']:.0f}"
        advantage = answer["advantage"]
        assert float(known["advantage"].replace("−", "-")) == pytest.approx(advantage, rel=1e-3)
        # colour: blue above, orange below, in five strengths of the step's largest advantage
        colours = tab.run(
            f"[...new Set([...document.querySelectorAll('.answer')[{place}].querySelectorAll('.tokens span')].map((e) => e.className))].join()"
        )
        assert colours.startswith("up-" if advantage > 0 else "down-")
    assert tab.faults == []


def test_the_number_of_a_token_is_told_by_pointer_and_by_keys(browser: Browser, run: Path):
    tab = shown(browser, run, at="#step=3&group=2&sort=row")
    answer = next(each for each in fake_step(3, skill=0.1 + 0.85 / 2) if each["group"] == 2)
    tab.run("document.querySelector('.tokens').focus()")
    tab.press("ArrowRight", 2)
    log_p = answer["logprobs"][1]
    told = texts(tab, ".answer output")[0]
    assert told.startswith(f"“{answer['pieces'][1]}”: token 2 of {len(answer['pieces'])}, advantage ")
    assert f"p {float(f'{math.exp(log_p):.4g}'):g}" in told
    box = tab.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])(document.querySelectorAll('.tokens span')[4].getBoundingClientRect())"
    )
    tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert ": token 5 of " in texts(tab, ".answer output")[0]
    assert texts(tab, ".tokens .at") == [answer["pieces"][4]]


def test_steps_groups_and_search_by_keys(browser: Browser, run: Path):
    tab = shown(browser, run, at="#step=3&sort=row")
    tab.press("ArrowRight")
    tab.until("document.getElementById('where').textContent === 'step 4 of 6' && !stepView.ariaBusy")
    tab.press("ArrowDown", 3)
    tab.press("ArrowUp")
    tab.press("Enter")
    assert (
        tab.run(
            "[...document.querySelectorAll('.group h3 button')].map((b) => b.ariaExpanded).indexOf('true')"
        )
        == 1
    )
    tab.press("Escape")
    assert count(tab, ".answer") == 0
    # search: the answers of this step that hold the words
    tab.press("/")
    assert tab.run("document.activeElement.id") == "search"
    tab.type("To get 24")
    rows = [each for each in fake_step(4, skill=0.1 + 0.85 * 4 / 6) if "To get 24" in each["text"]]
    tab.until("document.querySelector('#hits .note')")
    assert texts(tab, "#hits .note") == [f"{len(rows)} answers of this step with “to get 24”."]
    assert count(tab, ".group") == len({each["group"] for each in rows})
    tab.run("document.querySelector('#hits button').click()")
    tab.until("document.querySelector('#hits .note')?.textContent.includes('in 6 steps')")
    each_step = [
        sum("To get 24" in each["text"] for each in fake_step(step, skill=0.1 + 0.85 * step / 6))
        for step in range(1, 7)
    ]
    assert texts(tab, "#hits li") == [f"step {i}: {n}" for i, n in enumerate(each_step, 1) if n]
    tab.press("Escape")
    assert count(tab, ".group") == 8 and count(tab, "#hits *") == 0 and tab.faults == []


def test_a_picture_a_cell_and_the_address_lead_to_a_step_and_a_group(browser: Browser, run: Path):
    tab = shown(browser, run)
    point = "(({x, y, width, height}) => [x + width - 12, y + height / 2])(document.querySelector('svg[data-axes]').getBoundingClientRect())"
    x, y = tab.run(point)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        tab.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    tab.until("document.querySelector('#list .group')")
    assert tab.run("document.getElementById('where').textContent") == "step 6 of 6"
    tab.run("document.querySelectorAll('.cells button')[5].click()")
    assert tab.run("document.querySelector('#group-5 h3 button').ariaExpanded") == "true"
    rows = [each for each in fake_step(6, skill=0.95) if each["group"] == 5]
    assert texts(tab, "#group-5 .prompt") == [rows[0]["prompt"]]
    # the same address shows the same again
    again = shown(browser, run, at=tab.run("location.hash"))
    assert texts(again, "#group-5 .prompt") == [rows[0]["prompt"]] and again.faults == tab.faults == []


def test_a_watched_page_follows_the_run_until_a_step_is_open(browser: Browser, tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=2)
    source = write_report(run).with_name("rollouts.html").read_text(encoding="utf-8")
    page = run / "rollouts.html"
    page.write_text(source.replace('data-reload="0"', 'data-reload="0.2"'), encoding="utf-8")
    tab = shown(browser, run)
    page.write_text(
        source.replace("<h1>Rollouts", "<h1>Newer").replace('data-reload="0"', 'data-reload="0.2"')
    )
    tab.until("document.querySelector('h1').textContent.startsWith('Newer')")
    # opened again where a reload came in between
    tab.until("(view.place < 0 && openStep(0), document.querySelector('#list .group'))")
    page.write_text(source)
    tab.run("new Promise((done) => setTimeout(done, 600))")
    assert tab.run("document.querySelector('h1').textContent").startswith("Newer")


@pytest.mark.parametrize("order", ["worst", "best", "longest", "row"])
def test_groups_are_sorted(browser: Browser, run: Path, order: str):
    tab = shown(browser, run, at=f"#step=2&sort={order}")
    rows = fake_step(2, skill=0.1 + 0.85 * 2 / 6)
    value = {
        "worst": lambda g: mean(rows, g) or 0.0,
        "best": lambda g: -(mean(rows, g) or 0.0),
        "longest": lambda g: -max(len(each["pieces"]) for each in rows if each["group"] == g),
        "row": lambda g: next(each["row"] or 0 for each in rows if each["group"] == g),
    }[order]
    ids = tab.run("[...document.querySelectorAll('.group')].map((each) => Number(each.id.slice(6)))")
    values = [value(group) for group in ids]
    assert sorted(ids) == list(range(8)) and values == pytest.approx(sorted(values), abs=1e-12)
    assert len({round(value, 9) for value in values}) > 4  # there is something to sort


def test_what_changed_since_the_prompt_was_asked_before(browser: Browser, tmp_path: Path):
    def rows(step: int, texts: list[str]) -> list[Answer]:
        return [
            {"step": step, "group": 0, "answer": i, "prompt": "p", "text": text, "reward": i / 2}
            for i, text in enumerate(texts)
        ]

    run = fake_run(
        tmp_path / "run",
        rows={1: rows(1, ["no", "the old sum is 4"]), 2: rows(2, ["x", "y", "the new sum is 4, <b>yes</b>"])},
    )
    write_report(run)
    tab = shown(browser, run, at="#step=2&group=0")
    tab.until("document.querySelector('.change .text')")
    assert texts(tab, ".change h4") == ["Best answer since step 1: reward 0.5 → 1"]
    assert texts(tab, ".change del") == ["old "] and texts(tab, ".change ins") == ["new ", ", <b>yes</b>"]
    assert texts(tab, ".change .text") == ["the old new sum is 4, <b>yes</b>"] and count(tab, "b") == 0


HOSTILE = "</script><script>window.planted=1</script><img src=x onerror=planted=1>\u2028\x1b[31mred\x00\u202eabc\ud800"


def test_planted_text_does_nothing(browser: Browser, tmp_path: Path):
    """Script, image, U+2028, ANSI, NUL, a turned direction of writing, half a pair, a line of 1 MB, a name of
    a prototype: each is text, control characters are pictures."""
    texts_of = {name: HOSTILE for name in ("prompt", "text", "stop", "outcome", "message")}
    answer: Answer = {"step": 1, "group": 0, "answer": 0, "row": 1, "reward": 0.5, **texts_of}  # type: ignore[typeddict-item]
    parts = {"__proto__": 0.25, "constructor": 0.5, HOSTILE: 1.0}
    answer |= {"pieces": [HOSTILE, "a"], "logprobs": [-1.0, -0.5], "advantage": [1.0, -1.0], "parts": parts}
    turns: Answer = {**answer, "answer": 1, "turns": [[HOSTILE, HOSTILE]]}
    long: Answer = {
        "step": 1,
        "group": 1,
        "answer": 0,
        "reward": 1.0,
        "prompt": "long",
        "text": "<i>" * 2**18,
    }
    run = fake_run(tmp_path / "run", rows={1: [answer, turns, long], 2: [{**answer, "step": 2}]})
    write_report(run)
    tab = shown(browser, run, at="#step=1&group=0&group=1&sort=row")
    assert (
        tab.run("window.planted === undefined && {}.x === undefined")
        and count(tab, "img, i[class=x], b") == 0
    )
    words = tab.run("document.getElementById('list').textContent")
    assert words.count("</script><script>window.planted=1</script>") == 14
    assert "\u241b[31mred\u2400\u27e8U+202e\u27e9abc" in words
    assert not set("\x00\x1b\u202e") & set(tab.run("document.getElementById('step').textContent"))
    assert {"__proto__", "constructor"} <= set(texts(tab, ".answer dt"))
    # the text of 1 MB is cut, and whole after a click
    cut = "[...document.querySelectorAll('#group-1 .text')].at(-1).textContent.length"
    assert tab.run(cut) < 5000
    tab.run("document.querySelector('#group-1 .answer button').click()")
    assert tab.run(cut) == 3 * 2**18
    assert tab.faults == []


def test_words_of_a_judge_are_no_fault(browser: Browser, tmp_path: Path):
    """A judge explains each reward; a grader only why there is none."""
    judged: Answer = {"step": 1, "group": 0, "answer": 0, "reward": 0.7, "text": "a", "message": "Short. 7"}
    failed: Answer = {"step": 1, "group": 0, "answer": 1, "reward": None, "text": "b", "outcome": "timeout"}
    failed |= {"message": "5 s passed"}
    run = fake_run(tmp_path / "run", rows={1: [judged, failed]})
    write_report(run)
    tab = shown(browser, run, at="#step=1&group=0")
    assert "Short. 7" in tab.run("document.getElementById('list').textContent")
    assert texts(tab, "#list .bad") == ["5 s passed"] and tab.faults == []


def test_control_arm_a_script_that_stands_in_the_page_is_refused(browser: Browser, run: Path, tmp_path: Path):
    source = (run / "rollouts.html").read_text(encoding="utf-8")
    planted = '<script>window.planted=1</script><script src="planted.js"></script>'
    (tmp_path / "rollouts.html").write_text(
        source.replace("<footer>", planted + "<footer>"), encoding="utf-8"
    )
    (tmp_path / "planted.js").write_text("window.planted = 1;")
    tab = shown(browser, tmp_path)
    assert tab.run("window.planted === undefined")
    assert sum("Content Security Policy" in fault for fault in tab.faults) == 2


def test_a_missing_step_says_so_and_the_next_one_opens(browser: Browser, tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=2)
    write_report(run)
    (run / "rollouts" / "step-000001.js").unlink()
    tab = browser.open(run / "rollouts.html", at="#step=1")
    tab.until("document.querySelector('#step .bad')")
    assert texts(tab, "#step .bad") == [
        "rollouts/step-000001.js cannot be loaded: keep the folder beside this page, or run unfreeze report again."
    ]
    tab.press("ArrowRight")
    tab.until("document.querySelector('#list .group')")


def test_of_a_large_step_a_part_is_listed_and_tokens_are_cut(browser: Browser, tmp_path: Path):
    """2,000 groups, and an answer of 5,000 tokens: elements are counted, not seconds."""
    rows: list[Answer] = [
        {"step": 1, "group": g, "answer": 0, "prompt": "p", "reward": 0.0} for g in range(2000)
    ]
    rows[0] |= {"pieces": ["t "] * 5000, "logprobs": [-1.0] * 5000, "reward": -1.0}
    run = fake_run(tmp_path / "run", rows={1: rows})
    write_report(run)
    tab = shown(browser, run, at="#step=1&group=0")
    assert (count(tab, ".group"), count(tab, ".cells button"), count(tab, ".tokens span")) == (40, 600, 400)
    assert tab.run("document.querySelectorAll('*').length") < 2500
    tab.run("document.querySelector('.answer button').click()")
    tab.run("document.querySelector('#list > button').click()")
    assert count(tab, ".group") == 80


def test_a_step_that_left_answers_out_or_is_damaged_says_so(browser: Browser, tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=2)
    source = run / "rollouts" / "step-000001.jsonl.gz"
    source.write_bytes(source.read_bytes()[:-900])
    writer = Rollouts(run)
    writer.limit = writer.num_bytes / 1.5
    writer.write(3, fake_step(3))
    write_report(run)
    tab = shown(browser, run, at="#step=1")
    assert texts(tab, "#step .bad")[0].startswith("step-000001.jsonl.gz is cut or damaged: ")
    tab = shown(browser, run, at="#step=3")
    assert texts(tab, "#step .look") == [
        "Left out for the limit of the folder: 48 answers. The numbers are of all."
    ]
    assert [
        len(gzip.decompress(source.read_bytes())) > 0 for source in (run / "rollouts").glob("step-000003*.gz")
    ]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen_and_tokens_can_be_read(
    browser: Browser, run: Path, width: int, dark: bool
):
    """Contrast of text on the strongest colours of tokens: 4.5 : 1 (WCAG 2.2, 1.4.3), light and dark."""
    tab = shown(browser, run, at="#step=3&group=2&group=3", width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") == width
    contrast = """(name) => {
      const span = document.querySelector('.tokens').appendChild(document.createElement('span'));
      span.className = name;
      const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
      const over = rgb(getComputedStyle(span).backgroundColor);
      const paper = rgb(getComputedStyle(document.body).backgroundColor);
      const light = (c) => c.map((v) => (v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
      const back = light([0, 1, 2].map((i) => over[i] * over[3] + paper[i] * (1 - over[3])));
      const ink = light(rgb(getComputedStyle(span).color).slice(0, 3));
      span.remove();
      return (Math.max(back, ink) + .05) / (Math.min(back, ink) + .05);
    }"""
    for name in ("up-5", "down-5"):
        assert tab.run(f"({contrast})('{name}')") >= 4.5, name
