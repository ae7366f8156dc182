"""A field's two spellings, flat and in its table, are one field: equal configs, and an error where they differ."""

import json
from typing import ClassVar

import pytest
from pydantic import Field

from unfreeze.config import pretrain, sft
from unfreeze.config.names import flat, flat_name, given, leaves, nested, places
from unfreeze.config.parse import Frozen, from_keywords, parse
from unfreeze.core.errors import ConfigError


class Engine(Frozen):
    rate: float = Field(default=1e-3, gt=0)
    files: tuple[str, ...] = ()


class Config(Frozen):
    FLAT: ClassVar[dict[str, str]] = {"files": "engine.files", "rate": "engine.rate"}

    model: str
    engine: Engine = Engine()


FLAT_TOML = (
    'model = "m"\ndata = "chat.jsonl"\nlearning_rate = 3e-4\noptimizer_moments = "int8"\nkeep_saves = 5\n'
)
TABLES_TOML = (
    'model = "m"\n[data]\nfiles = "chat.jsonl"\n[optimizer]\nlearning-rate = 3e-4\nmoments = "int8"\n'
    "[save]\nkeep = 5\n"
)
FLAT_FLAGS = "--model m --data chat.jsonl --learning-rate 3e-4 --optimizer-moments int8 --keep-saves 5"
TABLE_FLAGS = (
    "--model m --data.files chat.jsonl --optimizer.learning-rate 3e-4 --optimizer.moments=int8 --save.keep 5"
)


def read(tmp_path, text: str, *flags: str) -> sft.Config:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return parse(sft.Config, [str(path), *flags], command="sft", description="")


def test_flat_and_table_spellings_give_equal_configs(tmp_path):
    wanted = sft.Config.model_validate(
        {
            "model": "m",
            "data": {"files": ("chat.jsonl",)},
            "optimizer": {"learning_rate": 3e-4, "moments": "int8"},
            "save": {"keep": 5},
        }
    )
    made = [
        read(tmp_path, FLAT_TOML),
        read(tmp_path, TABLES_TOML),
        *(
            parse(sft.Config, flags.split(), command="sft", description="")
            for flags in (FLAT_FLAGS, TABLE_FLAGS)
        ),
        from_keywords(
            sft.Config,
            {
                "model": "m",
                "data": "chat.jsonl",
                "learning_rate": 3e-4,
                "optimizer_moments": "int8",
                "keep_saves": 5,
            },
            function="sft",
        ),
        from_keywords(
            sft.Config,
            {
                "model": "m",
                "data": sft.Data(files=("chat.jsonl",)),
                "optimizer": {"learning_rate": 3e-4},
                "optimizer_moments": "int8",
                "save": {"keep": 5},
            },
            function="sft",
        ),
    ]
    assert all(config == wanted for config in made)
    assert all(json.dumps(flat(config)) == json.dumps(flat(wanted)) for config in made)


@pytest.mark.parametrize(
    "flags", ["--learning-rate 1e-5", "--optimizer.learning-rate 1e-5", "--optimizer.learning_rate=1e-5"]
)
@pytest.mark.parametrize("text", [FLAT_TOML, TABLES_TOML])
def test_a_flag_wins_over_the_file_in_either_spelling_and_leaves_the_rest_of_the_table(tmp_path, text, flags):
    config = read(tmp_path, text, *flags.split())
    assert config.optimizer == sft.Optimizer(learning_rate=1e-5, moments="int8")


def test_a_keyword_wins_over_the_file_field_by_field(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TABLES_TOML)
    made = from_keywords(sft.Config, {"optimizer": {"clip": 0.5}, "rank": 4}, function="sft", file=path)
    assert made.optimizer == sft.Optimizer(learning_rate=3e-4, moments="int8", clip=0.5)
    assert made.lora is not None and made.lora.rank == 4 and made.save.keep == 5


BOTH = [
    ("learning_rate = 1e-3\n[optimizer]\nlearning_rate = 2e-3\n", "learning_rate", "optimizer.learning_rate"),
    ("seed = 1\nkeep_saves = 3\n[save]\nkeep = 4\n", "keep_saves", "save.keep"),
    ("learning_rate = 1e-3\nlearning-rate = 2e-3\n", "learning_rate", "learning-rate"),
]


@pytest.mark.parametrize("text, one, other", BOTH)
def test_two_spellings_with_two_values_are_refused_naming_both(tmp_path, text, one, other):
    with pytest.raises(ConfigError, match=f"{one} = .* and {other} = .* are one field with two values"):
        read(tmp_path, f'model = "m"\ndata = "d"\n{text}')


def test_two_spellings_with_two_values_are_refused_in_flags_and_in_python():
    flags = [*FLAT_FLAGS.split(), "--optimizer.learning-rate", "1"]
    with pytest.raises(
        ConfigError, match=r"learning_rate = 0.0003 and optimizer.learning_rate = 1.0 are one"
    ):
        parse(sft.Config, flags, command="sft", description="")
    with pytest.raises(ConfigError, match=r"learning_rate = 2.0 and optimizer.learning_rate = 1.0 are one"):
        sft.Config.model_validate(
            {"model": "m", "data": "d", "learning_rate": 2.0, "optimizer": {"learning_rate": 1.0}}
        )


def test_two_spellings_with_one_value_are_read(tmp_path):
    toml = 'model = "m"\ndata = "d"\nlearning_rate = 1\n[optimizer]\nlearning_rate = 1.0\n'
    assert read(tmp_path, toml).optimizer.learning_rate == 1.0
    both = {"model": "m", "data": "d.jsonl", "lora": {"rank": 3}, "rank": 3}
    made = from_keywords(sft.Config, both, function="sft")
    assert made.lora is not None and made.lora.rank == 3


@pytest.mark.parametrize(
    "text, words",
    [
        ("[optimizer]\nlearning_rat = 1", "unknown key optimizer.learning_rat; nearest: 'learning_rate'"),
        ("[optimizer]\nlr = 1", r"unknown key optimizer.lr; it is called optimizer.learning_rate here"),
        ("[training]\nmax_seq_length = 9", "it is called data.sequence_length here"),
        ("[save]\nkeep_saves = 9", r"unknown key save.keep_saves; it stands in \[save\]: save.keep"),
        ("[memory]\nclip = 9", r"unknown key memory.clip; it stands in \[optimizer\]: optimizer.clip"),
        ("[memory]\nseed = 9", "unknown key memory.seed; it stands above the tables: seed"),
        ("moments = 'int8'", r"unknown key moments; it stands in \[optimizer\]: optimizer.moments"),
        ("[optimiser]\nclip = 1", "unknown key optimiser; nearest: 'optimizer'"),
        ("optimizer = 'adamw_8bit'", "unknown key optimizer; it is called optimizer_moments here"),
        ("memory = 3", r"memory = 3 should be a table \[memory\]"),
        ("[training.steps]\na = 1", "training.steps is a table; it should be a value"),
        ("[save]\nkeep = 0", "save.keep = 0: must be at least 1"),
        ("[save]\nkeep = '2'", "save.keep = '2' is not a whole number"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_the_nearest_right_key(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, f'model = "m"\ndata = "d"\n{text}')


def test_limits_of_a_flag_are_told_by_the_flag_as_it_was_given():
    flags = [*FLAT_FLAGS.split(), "--save.every", "-1"]
    with pytest.raises(ConfigError, match=r"^--save\.every -1: "):
        parse(sft.Config, flags, command="sft", description="")


@pytest.mark.parametrize("recipe", [sft, pretrain])
def test_every_field_has_one_flat_name_and_no_table_more_than_twelve(recipe):
    config = recipe.Config
    there = [place for place, _ in leaves(config)]
    assert sorted(places(config).values()) == sorted(there)
    assert all("." not in name or name.startswith(("lora.", "place.")) for name in places(config))
    tables = [config, *{type(value) for value in dict(config(model="m", data="d")).values()}]
    counted = {table.__name__: len(table.model_fields) for table in tables if hasattr(table, "model_fields")}
    counted["Config"] = len([place for place in there if "." not in place])  # the keys above the tables
    assert max(counted.values()) <= 12, counted


def test_a_config_without_tables_or_with_its_own_map():
    assert places(Engine) == {"rate": "rate", "files": "files"}
    assert list(places(Config)) == ["files", "rate", "model"] and flat_name(Config, "engine.rate") == "rate"
    made = parse(Config, ["--model", "m", "--files", "a", "b"], command="x", description="")
    assert made.engine.files == ("a", "b") and given(made) == ["files", "model"]
    assert flat(made) == {"files": ["a", "b"], "rate": 1e-3, "model": "m"}
    assert (
        nested({"lora": {}, "lora.rank": 2}) == nested({"lora.rank": 2, "lora": {}}) == {"lora": {"rank": 2}}
    )


def test_a_field_that_moved_is_read_where_earlier_files_have_it(tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text('model = "m"\n[data]\nfiles = "chat.jsonl"\npacking = "best_fit"\n')
    assert parse(sft.Config, [str(toml)], command="sft", description="").training.packing == "best_fit"
    for moved, place in sft.Config.MOVED.items():
        assert moved not in dict(leaves(sft.Config)) and place in dict(leaves(sft.Config))
