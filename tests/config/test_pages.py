"""No page, example or script tells a name of earlier versions: what they show runs without a note."""

import re
import tomllib
from pathlib import Path

import pytest

from unfreeze.config.names import earlier, spellings
from unfreeze.config.recipes import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
TODAY = {word for config in CONFIGS.values() for word in spellings(config)}
OLD = {word for config in CONFIGS.values() for word in earlier(config)} - TODAY
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*", "benchmarks/*.py", "benchmarks/*.sh", ".ci/*")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".sh", ".toml", ".yaml", ".ipynb", "") and path.is_file()
    if path.name not in ("CHANGELOG.md", "decisions.md")  # they tell what was
    if path.name not in ("commands.md", "errors.md")  # made of what the program says
)
OWN = {  # a command's own flag of such a name
    "samples": r"data show|`--samples`: documents",
    "top-k": r"unfreeze (?:chat|generate|upcycle)",
    "experts": r"unfreeze upcycle",
    "adapters": r"unfreeze chat",
    "budget-usd": r"unfreeze synth|`plan`|needs a price",
    "timeout": r"`--timeout` \(600 s\)",
    "price-read": r"unfreeze synth|needs a price",
    "price-written": r"unfreeze synth|needs a price",
}


def old_flags(text: str) -> list[str]:
    """The flags of `text` that are names of earlier versions, each with its line."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("note: ") or "dev bench" in line:
            continue
        for flag in re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", line):
            own = OWN.get(flag)
            if flag.replace("-", "_") in OLD and not (own and re.search(own, line)):
                found.append(f"--{flag}: {line.strip()[:100]}")
    return found


def old_keys(text: str) -> list[str]:
    """The keys of a TOML text, dotted, that are names of earlier versions."""
    table = tomllib.loads(text)
    names = [
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in table.items()
        for inner in (value if isinstance(value, dict) else [key])
    ]
    return [name for name in names if name.replace("-", "_") in OLD]


def old_keywords(text: str) -> list[str]:
    """The keywords of calls such as unfreeze.sft(…) that are names of earlier versions."""
    calls = re.findall(
        r"unfreeze\.(?:sft|distill|prefer|pretrain|prepare)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text
    )
    return [word for call in calls for word in re.findall(r"(\w+)=", call) if word in OLD]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_tells_a_name_of_earlier_versions(path):
    text = path.read_text(encoding="utf-8")
    of_a_run = path.parent.name != "synth"  # recipes of synthesis have fields of their own
    blocks = (
        [text] * of_a_run if path.suffix == ".toml" else re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    )
    assert not (old_flags(text) + [key for block in blocks for key in old_keys(block)] + old_keywords(text))


def test_control_arm_a_planted_one_is_found():
    assert old_flags("unfreeze sft --model M --weight-decay 0.1") == [
        "--weight-decay: unfreeze sft --model M --weight-decay 0.1"
    ]
    assert old_flags("`--samples`") and not old_flags("unfreeze data show F --samples 3")
    assert not old_flags("unfreeze sft --optimizer.weight-decay 0.1 --learning-rate 1 --columns a=b")
    assert old_keys("clip = 1\n[memory]\nrecompute = 'layers'\n[place]\nsplit = 1") == [
        "clip",
        "memory.recompute",
    ]
    assert old_keywords("unfreeze.sft(model=M, clip=1, rank=2)") == ["clip"]
    assert len(PAGES) > 40 and len(OLD) > 50
