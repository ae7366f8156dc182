"""Every TOML file under examples/ is a Config its recipe accepts, and names files that exist in a clone (or
says how they are made)."""

from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.config.parse import parse
from unfreeze.recipes import pretrain, sft

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"synth", "lives", "lab"}  # tests/synth/test_recipes.py; below; test_lab_tomls.py
EXAMPLES = sorted(
    path
    for path in set((ROOT / "examples").rglob("*.toml")) - {ROOT / "examples" / "clean.toml"}
    if path.parent.name not in OTHERS
)
"""All but a recipe of data clean, which tests/config/test_clean.py reads."""


def test_the_stages_of_a_life_are_commands_that_parse(monkeypatch):
    """Each command of a training recipe, with folders in place of the stages that it reads."""
    from unfreeze.config.life import filled, read_life
    from unfreeze.config.recipes import CONFIGS

    monkeypatch.chdir(ROOT)
    life = read_life(ROOT / "examples" / "lives" / "small.toml")
    folders = {stage.name: Path("build") / stage.name for stage in life.stages}
    trained = [stage for stage in life.stages if stage.run and stage.words[0] in CONFIGS]
    for stage in trained:
        words = [filled(word, folders) for word in stage.words[1:]]
        parse(CONFIGS[stage.words[0]], words, command=stage.words[0], description="")
    assert [stage.words[0] for stage in trained][:4] == ["pretrain", "sft", "pretrain", "distill"]


def pretrains(path: Path) -> bool:
    return "pretrain" in (path.stem, path.parent.name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted_by_its_recipe(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = pretrain if pretrains(path) else sft
    config = parse(recipe.Config, [str(path)], command="x", description="")
    assert f"unfreeze {recipe.__name__.rsplit('.', 1)[1]} {path.relative_to(ROOT)}" in path.read_text()
    for name in (config.model, *config.data.files):
        made_by_generator = (
            name.startswith("build/tiny-k2/") and "generate.py --out build/tiny-k2" in path.read_text()
        ) or (
            name.startswith(f"build/{path.stem}/")
            and f"python examples/pretrain/{path.stem}.py" in path.read_text()
            and path.with_suffix(".py").is_file()
        )
        assert made_by_generator or (ROOT / name).exists(), f"{path.name} names {name}, which no clone has"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_where_its_paths_count_from_and_so_does_the_error(
    path, monkeypatch, tmp_path, capsys
):
    assert "count from the folder that the command is given in" in path.read_text().split("\nmodel =")[0]
    monkeypatch.chdir(tmp_path)
    recipe = "pretrain" if pretrains(path) else "sft"
    assert cli.main([recipe, str(path)]) == 2
    assert f".jsonl' is not a file or folder in {tmp_path}\n" in capsys.readouterr().err
    data = tmp_path / "chat.jsonl"
    data.write_text("{}")
    assert cli.main([recipe, str(path), "--data", str(data)]) == 2
    error = capsys.readouterr().err
    missing = (
        f" does not exist in {tmp_path}\n",
        "tokenizer' is not a folder\n",
        "held_out.jsonl' is not a file",
    )
    assert any(words in error for words in missing)
    assert cli.main([recipe, str(path), "--data", str(tmp_path / "none.jsonl")]) == 2
    assert (
        "none.jsonl' is not a file or folder\n" in capsys.readouterr().err
    )  # where a path is whole, nothing is added


def test_there_are_examples():
    assert len(EXAMPLES) >= 2
