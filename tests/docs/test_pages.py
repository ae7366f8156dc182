"""Claims about the pages: the made ones are what the program says, the blocks parse, nothing lacks its page."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from blocks import PAGES, ROOT, Block, blocks_of, commands_of, lay_out

import unfreeze
from benchmarks import reference_pages
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.judge import read_judge
from unfreeze.config.lab import read_lab
from unfreeze.config.life import read_life
from unfreeze.config.names import by_path
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.errors import UserError
from unfreeze.synth.recipe import read_recipe

DOCS = ROOT / "docs"
OTHER_FILES = {
    "judge.toml": read_judge,
    "yoda.toml": read_recipe,
    "life.toml": lambda path: read_life(Path(path)),
    "study.toml": lambda path: read_lab(Path(path)),
}
"""Files of the pages that are not of a run, and what reads them."""
MOST_WORDS = 46_600  # of what one reads from the front to the back


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_made_page_is_what_the_program_says(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert reference_pages.PAGES[name]() == written, "run: python benchmarks/reference_pages.py"


def anchors(page: Path) -> set[str]:
    """What a # in a link to the page can name."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def questions(index: str) -> dict[str, list[str]]:
    """Question -> links of its answer."""
    rows = re.findall(r"^\| ([^|]+\?[^|]*) \| ([^|]+) \|$", index, re.MULTILINE)
    return {question: re.findall(r"\]\(([^)]+)\)", answer) for question, answer in rows}


def unanswered(index: str) -> list[str]:
    """The questions whose links lead to no page, or to no heading of it."""
    bad = []
    for question, links in questions(index).items():
        for link in links:
            path, _, anchor = link.partition("#")
            page = DOCS / path
            if not page.is_file() or (anchor and anchor not in anchors(page)):
                bad.append(f"{question} {link}")
        bad += [] if links else [question]
    return bad


def test_twenty_questions_lead_to_their_answer_in_one_click():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert len(questions(index)) >= 20
    assert unanswered(index) == []
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_control_arm_a_question_that_leads_nowhere_is_seen():
    index = "| A? | [a](start/gone.md) |\n| B? | [b](start/install.md#gone) |\n| C? | none |\n"
    index += "| D? | [d](start/install.md#extras) |\n"
    assert unanswered(index) == ["A? start/gone.md", "B? start/install.md#gone", "C?"]


def shown(pages: list[Path]) -> set[str]:
    """The commands that a block of these pages has: "sft", "dev drill"."""
    found: set[str] = set()
    for page in pages:
        for block in blocks_of(page):
            text = block.text
            found |= set(re.findall(r"\bunfreeze (dev [\w-]+|[\w-]+)", text))
        found |= set(re.findall(r"`unfreeze (dev \w+)", page.read_text(encoding="utf-8")))
    return found


def test_each_command_has_a_page_that_shows_it():
    names = {f"dev {name}" if name in cli.DEV else name for name in cli.COMMANDS}
    assert not names - shown(PAGES), "add it to a page of docs/howto"


def test_control_arm_a_command_without_a_page_is_seen():
    assert "sft" not in shown([DOCS / "howto" / "gguf.md"])


def test_each_public_name_is_on_the_page_of_the_api():
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert not [name for name in unfreeze.__all__ if not re.search(rf"unfreeze\.{name}\b", page)]


def test_the_site_lists_every_page_once():
    class Loader(yaml.SafeLoader):
        pass

    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        inside = node.values() if isinstance(node, dict) else node
        return [leaf for part in inside for leaf in leaves(part)]

    nav = leaves(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_what_one_reads_from_front_to_back_is_short():
    pages = [ROOT / "README.md", DOCS / "index.md", *PAGES, *(DOCS / "why").glob("*.md")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert 10_000 < words <= MOST_WORDS


def written_twice(blocks: dict[str, list[Block]]) -> list[str]:
    """The folders and files that two commands of these pages write: the second one is refused.

    A page that allows a changed setting continues its own run.
    """
    begun: dict[str, str] = {}
    twice = []
    for page, each in blocks.items():
        for words in (words for block in each if block.language == "sh" for words in commands_of(block)):
            recipe = words[words.index("unfreeze") + 1]
            flag = "--file" if recipe == "init" else "--out"
            if recipe not in (*CONFIGS, "init") or "--save.allow-changed" in words:
                continue
            place = words[words.index(flag) + 1] if flag in words else "run.toml" if recipe == "init" else ""
            twice += [f"{place}: {begun[place]} and {page}"] if place in begun else []
            begun |= {place: page} if place else {}
    return twice


def test_no_two_pages_begin_the_same_run():
    assert written_twice({page.stem: blocks_of(page) for page in PAGES}) == []


def test_control_arm_a_run_that_another_page_has_begun_is_seen():
    first = [Block("sh", "", "unfreeze init M a.jsonl\nunfreeze sft run.toml --out runs/a\n")]
    other = [Block("sh", "", "unfreeze sft --model M --data b.jsonl --out runs/a\nunfreeze init M b.jsonl\n")]
    assert written_twice({"a": first, "b": other}) == ["runs/a: a and b", "run.toml: a and b"]
    longer = [Block("sh", "", "unfreeze sft --out runs/a --steps 8 --save.allow-changed steps\n")]
    assert written_twice({"a": first, "b": longer}) == []


class Parsed(BaseException):
    """The flags of a command were read."""


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a command's flags as it does itself, and go no further. Raises UserError."""
    if words[0] == "torchrun":
        words = words[words.index("unfreeze") :]
    words = [word for word in words[1:] if word not in cli.FLAGS]
    if words[0] in ("dev", "--version"):
        assert words[0] == "--version" or words[1] in cli.DEV
        return
    if "--sweep" in words:
        at = words.index("--sweep")
        for pair in words[at + 1 :]:
            by_path(CONFIGS[words[0]], {pair.partition("=")[0]: "0"}, "--sweep")
        words = words[:at]
    module = importlib.import_module(cli.COMMANDS[words[0]].module)
    while hasattr(module, "PARTS"):  # of a command with subcommands
        module, words = module.PARTS[words[1]], words[1:]
    parse = module.parse

    def stop(*arguments: object, **keywords: object) -> None:
        parse(*arguments, **keywords)
        raise Parsed

    monkeypatch.setattr(module, "parse", stop)
    with pytest.raises(Parsed):
        module.main(words[1:], cli.Common(quiet=True))
    monkeypatch.undo()


def check(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises where the block is not what its language says."""
    if block.language == "python":
        compile(block.text, block.title or "block", "exec")
    elif block.language == "toml":
        tomllib.loads(block.text)
        if block.title in OTHER_FILES:
            (folder / block.title).write_text(block.text)
            OTHER_FILES[block.title](str(folder / block.title))
            return
        (folder / "block.toml").write_text(block.text)
        told = tomllib.loads(block.text)
        recipe = "grpo" if "reward" in told else "pretrain" if "shape" in told else "sft"
        check_command(["unfreeze", recipe, "block.toml"], monkeypatch)
    elif block.language == "json":
        assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
    elif block.language == "sh":
        for words in commands_of(block):
            monkeypatch.chdir(folder)
            check_command(words, monkeypatch)
    else:
        assert block.language == "text", f"a block of {block.language!r}: sh, python, toml, json or text"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_parse(page, tmp_path, monkeypatch):
    lay_out(tmp_path, made=True)
    (tmp_path / "MODEL").symlink_to(TINY_K2)
    blocks = blocks_of(page)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    if page.parent.name == "howto" and page.stem not in ("teacher_layers", "choose_method"):
        assert any(line.startswith("```") for line in lines[:4]), "a block stands on top of a how-to"
    for block in blocks:
        monkeypatch.chdir(tmp_path)
        check(block, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "block",
    [
        Block("sh", "", "unfreeze sft --model MODEL --data chat.jsonl --lerning-rate 1\n"),
        Block("toml", "", 'model = "MODEL"\n[data]\nfile = "chat.jsonl"\n'),
        Block("toml", "judge.toml", 'endpoint = "http://127.0.0.1"\n'),
        Block("python", "", "run = unfreeze.sft(\n"),
        Block("bash", "", "true"),
    ],
    ids=lambda block: block.title or block.language,
)
def test_control_arm_a_wrong_block_is_seen(block, tmp_path, monkeypatch):
    lay_out(tmp_path, made=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SyntaxError, AssertionError)):
        check(block, tmp_path, monkeypatch)
