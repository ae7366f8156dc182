"""Every TOML file under examples/ is a Config its recipe accepts, and names files that exist in a clone (or
says how they are made)."""

from pathlib import Path

import pytest

from unfreeze.config.parse import parse
from unfreeze.recipes import pretrain, sft

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted_by_its_recipe(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = pretrain if path.stem.startswith("pretrain") else sft
    config = parse(recipe.Config, [str(path)], command="x", description="")
    assert f"unfreeze {recipe.__name__.rsplit('.', 1)[1]} {path.relative_to(ROOT)}" in path.read_text()
    for name in (config.model, *config.data.files):
        made_by_generator = (
            name.startswith("build/tiny-k2/") and "generate.py --out build/tiny-k2" in path.read_text()
        )
        assert made_by_generator or (ROOT / name).exists(), f"{path.name} names {name}, which no clone has"


def test_there_are_examples():
    assert len(EXAMPLES) >= 2
