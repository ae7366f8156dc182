"""A field has one dotted name, some have an alias, and names of earlier versions still run, with one line."""

import json

import pytest
from pydantic import Field

from unfreeze.commands import data_show, generate, plan
from unfreeze.config import pretrain, sft
from unfreeze.config.names import by_path, earlier, fields, flat, given, name_of, nested, of_today, spellings
from unfreeze.config.parse import Frozen, from_keywords, parse
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about


class Engine(Frozen):
    rate: float = Field(default=1e-3, gt=0, json_schema_extra=about(was="speed"))
    files: tuple[str, ...] = Field(default=(), json_schema_extra=about(alias="files"))


class Config(Frozen):
    model: str
    engine: Engine = Engine()


FLAT_TOML = (
    'model = "m"\ndata = "chat.jsonl"\nlearning_rate = 3e-4\noptimizer_moments = "int8"\nkeep_saves = 5\n'
)
TABLES_TOML = (
    'model = "m"\n[data]\nfiles = "chat.jsonl"\n[optimizer]\nlearning-rate = 3e-4\nmoments = "int8"\n'
    "[save]\nkeep = 5\n"
)
FLAT_FLAGS = "--model m --data chat.jsonl --learning-rate 3e-4 --optimizer.moments int8 --save.keep 5"
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
    ("seed = 1\nkeep_saves = 3\n[save]\nkeep = 3\n", "keep_saves", "save.keep"),
    ("learning_rate = 1e-3\nlearning-rate = 1e-3\n", "learning_rate", "learning-rate"),
    (
        "[memory]\nrecompute = 'layers'\n[place]\nrecompute = 'layers'\n",
        "memory.recompute",
        "place.recompute",
    ),
]


@pytest.mark.parametrize("text, one, other", BOTH)
def test_two_spellings_of_one_field_are_refused_naming_both(tmp_path, text, one, other):
    with pytest.raises(ConfigError, match=f"run.toml: {one} and {other} are one field, given twice"):
        read(tmp_path, f'model = "m"\ndata = "d"\n{text}')


def test_two_spellings_are_refused_in_flags_and_in_python():
    for old, new in (("--learning-rate", "--optimizer.learning-rate"), ("--keep-saves", "--save.keep")):
        with pytest.raises(ConfigError, match="are one field, given twice") as found:
            parse(
                sft.Config, [*"--model m --data d".split(), old, "1", new, "1"], command="sft", description=""
            )
        assert {name(old), name(new)} <= set(found.value.message.split())
        assert found.value.next == f"give {name(old) if 'rate' in old else 'save.keep'} alone"
    with pytest.raises(ConfigError, match=r"learning_rate and optimizer\.learning_rate are one"):
        sft.Config.model_validate(
            {"model": "m", "data": "d", "learning_rate": 1.0, "optimizer": {"learning_rate": 1.0}}
        )
    both = {"model": "m", "data": "d.jsonl", "lora": {"rank": 3}, "rank": 3}
    with pytest.raises(ConfigError, match=r"unfreeze.sft: lora.rank and rank are one field"):
        from_keywords(sft.Config, both, function="sft")


def name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


OLD = [
    ("--weight-decay 0.1", "--weight-decay is --optimizer.weight-decay now"),
    ("--optimizer_moments int8", "--optimizer-moments is --optimizer.moments now"),
    ("--clip 2 --save-minutes=3", "--clip is --optimizer.clip now; --save-minutes is --save.minutes now"),
    ("--place.recompute layers", ""),
    ("--learning-rate 1 --rank 2 --data.columns prompt=q", ""),
]


@pytest.mark.parametrize("flags, says", OLD)
def test_a_flag_of_earlier_versions_runs_and_one_line_says_its_name_of_today(flags, says, capsys):
    parse(sft.Config, [*"--model m --data d".split(), *flags.split()], command="sft", description="")
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"note: {says}\n" if says else "")


def test_a_key_of_earlier_versions_is_said_with_its_file_and_a_keyword_alone(tmp_path, capsys):
    read(tmp_path, 'model = "m"\ndata = "d"\n[memory]\nrecompute = "layers"\n', "--clip", "1")
    file = tmp_path / "run.toml"
    said = f"note: {file}: memory.recompute is place.recompute now; --clip is --optimizer.clip now\n"
    assert capsys.readouterr().err == said
    made = from_keywords(sft.Config, {"model": "m", "data": "d", "weight_decay": 0.3}, function="sft")
    assert made.optimizer.weight_decay == 0.3
    assert capsys.readouterr().err == "note: weight_decay is optimizer.weight_decay now\n"
    dotted = {"model": "m", "data": "d", "optimizer.weight_decay": 0.3}
    assert from_keywords(sft.Config, dotted, function="sft") == made and not capsys.readouterr().err


def test_only_the_first_process_says_it(monkeypatch, capsys):
    words = "--model m --data d --clip 1".split()
    for rank, lines in (("0", 1), ("1", 0)):
        for variable, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(variable, value)
        parse(sft.Config, words, command="sft", description="")
        assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("config", [*CONFIGS.values(), plan.Config, generate.Config, data_show.Config])
def test_every_name_of_earlier_versions_is_read_and_none_is_a_name_of_today(config):
    old = earlier(config)
    assert old and not old.keys() & spellings(config).keys()
    assert set(old.values()) <= set(fields(config))
    for word, now in old.items():
        info = fields(config)[now].info
        value = info.get_default(call_default_factory=True)
        renamed: dict[str, str] = {}
        assert by_path(config, {word: value}, "x", renamed=renamed) == {fields(config)[now].path: value}
        assert renamed == {word: now}


def test_a_word_of_two_tables_is_the_later_ones():
    assert name_of(sft.Config, "alpha") == "lora.alpha"
    assert name_of(CONFIGS["distill"], "alpha") == "distillation.alpha"
    assert name_of(CONFIGS["distill"], "beta") == "distillation.beta"
    assert name_of(CONFIGS["prefer"], "beta") == "preference.beta"
    assert name_of(sft.Config, "no-field") == "no-field"


def test_a_record_of_any_version_is_read_by_the_names_of_today():
    old = {
        "learning_rate": 1.0,
        "memory": {"recompute": "layers"},
        "lora": {"rank": 2},
        "clip": 3,
        "x": {"y": 1},
    }
    now = {
        "optimizer.learning_rate": 1.0,
        "place.recompute": "layers",
        "lora.rank": 2,
        "optimizer.clip": 3,
        "x": {"y": 1},
    }
    assert of_today(sft.Config, old) == now == of_today(sft.Config, now)
    assert of_today(sft.Config, {"lora": None}) == {"lora": None}


@pytest.mark.parametrize(
    "text, words",
    [
        ("[optimizer]\nlearning_rat = 1", "unknown key optimizer.learning_rat; nearest: 'learning_rate'"),
        ("[optimizer]\nlr = 1", r"unknown key optimizer.lr; it is called optimizer.learning_rate here"),
        ("[training]\nmax_seq_length = 9", "it is called data.sequence_length here"),
        ("[save]\nkeep_saves = 9", r"unknown key save.keep_saves; it belongs in \[save\]: save.keep"),
        ("[memory]\nclip = 9", r"unknown key memory.clip; it belongs in \[optimizer\]: optimizer.clip"),
        ("[memory]\nseed = 9", "unknown key memory.seed; it belongs above the tables: seed"),
        ("moments = 'int8'", r"unknown key moments; it belongs in \[optimizer\]: optimizer.moments"),
        ("[optimiser]\nclip = 1", "unknown key optimiser; nearest: 'optimizer'"),
        ("optimizer = 'adamw_8bit'", "unknown key optimizer; it is called optimizer.kind here"),
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
def test_every_field_has_one_name_and_no_table_more_than_twelve(recipe):
    config = recipe.Config
    there = list(fields(config))
    assert [known.path for known in fields(config).values()] == there
    short = [known.short for known in fields(config).values()]
    assert (
        len(set(short)) == len(short)
        and 10 <= sum(known.about.alias != "" for known in fields(config).values()) <= 23
    )
    tables = [config, *{type(value) for value in dict(config(model="m", data="d")).values()}]
    counted = {table.__name__: len(table.model_fields) for table in tables if hasattr(table, "model_fields")}
    counted["Config"] = len([name for name in there if "." not in name])  # the keys above the tables
    assert max(counted.values()) <= 12, counted


def test_a_field_that_is_declared_again_keeps_what_stands_at_the_first():
    first, again = (
        fields(sft.Config)["optimizer.weight_decay"],
        fields(pretrain.Config)["optimizer.weight_decay"],
    )
    assert (first.info.default, again.info.default) == (0.0, 0.1) and first.about == again.about
    assert first.about.was == "weight_decay" and first.about.heading == "Learning"


def test_a_config_of_its_own():
    assert spellings(Engine) == {"rate": "rate", "files": "files"}
    assert spellings(Config) == {
        "model": "model",
        "engine.rate": "engine.rate",
        "engine.files": "engine.files",
        "files": "engine.files",
    }
    made = parse(Config, ["--model", "m", "--files", "a", "b"], command="x", description="")
    assert made.engine.files == ("a", "b") and given(made) == ["model", "engine.files"]
    assert flat(made) == {"model": "m", "engine.rate": 1e-3, "engine.files": ["a", "b"]}
    assert (
        nested({"lora": {}, "lora.rank": 2}) == nested({"lora.rank": 2, "lora": {}}) == {"lora": {"rank": 2}}
    )
