"""TOML and flags: every field is both, a flag wins, and what is wrong is named with the nearest right key."""

import pytest
from pydantic import Field

from unfreeze.commands import eval as scoring
from unfreeze.config import parse as parsing
from unfreeze.config import sft
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Frozen, parse
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.errors import ConfigError


class Inner(Frozen):
    rank: int = Field(default=16, ge=1)
    targets: tuple[str, ...] = ("all-linear",)
    experts_rank: int | None = None


class Config(Frozen):
    model: str
    steps: int | None = None
    learning_rate: float = Field(default=1e-3, gt=0)
    lora: Inner = Field(default_factory=lambda: Inner())


def read(tmp_path, text: str, *flags: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return parse(Config, [str(path), *flags], command="sft", description="")


def test_toml_and_flags_give_the_same_config(tmp_path):
    toml = (
        'model = "m"\nsteps = 5\nlearning_rate = 3e-4\n[lora]\nrank = 8\ntargets = ["experts",'
        ' "*.q_proj"]\nexperts_rank = 4\n'
    )
    flags = (
        "--model m --steps 5 --learning-rate 3e-4 --lora.rank 8 --lora.targets experts *.q_proj"
        " --lora.experts-rank 4".split()
    )
    assert read(tmp_path, toml) == parse(Config, flags, command="sft", description="")
    assert read(tmp_path, toml).lora == Inner(rank=8, targets=("experts", "*.q_proj"), experts_rank=4)


@pytest.mark.parametrize("words", ["attention,experts", "attention, *.q_proj,", "attention"])
def test_commas_separate_targets_too(words, tmp_path):
    """As in a list: one TOML string, one flag, several flags, and Python."""
    names = tuple(filter(None, words.replace(",", " ").split()))
    path = tmp_path / "run.toml"
    for value in (f'"{words}"', f'["{words}"]', str(list(names))):
        path.write_text(f'model = "m"\ndata = "d"\nlora.targets = {value}\n', encoding="utf-8")
        assert parse(CONFIGS["sft"], [str(path)], command="sft", description="").lora.targets == names
    flags = "--model m --data d --lora.targets".split()
    for typed_as in ([words], list(names)):
        assert parse(CONFIGS["sft"], [*flags, *typed_as], command="sft", description="").lora.targets == names
    assert LoraConfig(targets=words).targets == names  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="targets"):
        parse(CONFIGS["sft"], [*flags, ","], command="sft", description="")


def test_a_flag_wins_over_the_file(tmp_path):
    config = read(tmp_path, 'model = "m"\nsteps = 5\n[lora]\nrank = 8\n', "--steps", "7", "--lora.rank", "2")
    assert (config.steps, config.lora.rank, config.model) == (7, 2, "m")


@pytest.mark.parametrize(
    "text, words",
    [
        ('modle = "m"', "unknown key modle; nearest: 'model'"),
        ('model = "m"\n[lora]\nrnak = 8', "unknown key lora.rnak; nearest: 'rank'"),
        ("model = ", "not valid TOML"),
        ('model = "m"\n[steps]\na = 1', "steps is a table"),
        ('model = "m"\nlearning_rate = -1', "learning_rate = -1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        parse(Config, [str(tmp_path / "no.toml")], command="sft", description="")


def test_a_config_cannot_be_changed(tmp_path):
    with pytest.raises(Exception, match="frozen"):
        read(tmp_path, 'model = "m"').steps = 3


def test_the_command_to_repeat_is_the_one_given_under_torchrun_too(monkeypatch):
    from unfreeze.job.end.folder import typed

    assert typed("sft", ["run.toml", "--out", "a b"]) == "unfreeze sft run.toml --out 'a b'"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert typed("sft", ["run.toml"]) == "torchrun --nproc-per-node 2 -m unfreeze sft run.toml"


def test_a_flag_of_several_values_is_given_once():
    """The values of the first time would be lost; of a flag with one value the last wins, as ever."""

    def flags(*words):
        return parse(Config, ["--model", "m", *words], command="sft", description="")

    for again in (["--lora.targets", "mlp"], ["--lora.targets=mlp"]):
        with pytest.raises(ConfigError, match=r"--lora\.targets is given twice"):
            flags("--lora.targets", "experts", *again)
    made = flags("--lora.targets", "experts", "mlp", "--steps", "3", "--steps", "4")
    assert made.lora.targets == ("experts", "mlp") and made.steps == 4


def test_a_field_of_a_table_without_its_table_is_named():
    for flag in ("--targets", "--experts_rank", "--rank"):
        with pytest.raises(ConfigError, match=f"it is called --lora.{flag[2:].replace('_', '-')} here"):
            parse(Config, ["--model", "m", flag, "8"], command="sft", description="")


def test_fields_of_a_table_that_exclude_each_other_are_named_without_the_table():
    from unfreeze.config.sft import Config

    flags = ["--model", "m", "--data", "d", "--merge-aware", "int4"]
    for other in (["--lora.dora"], ["--lora.start", "pissa"]):
        with pytest.raises(ConfigError) as caught:
            parse(Config, [*flags, *other], command="sft", description="")
        assert caught.value.message.startswith("merge_aware rounds ordinary factors, not lora.")
    assert parse(Config, flags, command="sft", description="").lora.merge_aware == "int4"  # control arm


@pytest.mark.parametrize("setting", [("--merge-aware-from", "0.5"), ("--merge-aware-scales", "keep-change")])
def test_settings_of_merge_aware_training_need_it(setting):
    from unfreeze.config.sft import Config

    flags = ["--model", "m", "--data", "d", *setting]
    with pytest.raises(ConfigError, match="has no effect without merge_aware: give it too, such as int4"):
        parse(Config, flags, command="sft", description="")
    parse(Config, [*flags, "--merge-aware", "int4"], command="sft", description="")  # control arm


def test_a_value_behind_an_equals_sign_may_begin_with_dashes():
    def of(*arguments):
        return parse(Config, list(arguments), command="sft", description="")

    assert of("--model=--x 1 | --y").model == "--x 1 | --y"
    assert of("--model", "m", "--lora.targets=--x", "--steps", "2").lora.targets == ("--x",)
    with pytest.raises(ConfigError, match="no flag --x"):  # control arm
        of("--model", "--x")
    with pytest.raises(ConfigError, match="steps"):
        of("--model", "m", "--steps=three")


SFT = ["--model", "m", "--data", "a", "b", "--lora.dora"]
ASKED = ["run", "other", "--tasks", "needle"]
LINES = [
    (sft.Config, [*SFT, "--learning_rate=1e-3", "--lora.targets", "experts", "*.q_proj", "--dtype", "auto"]),
    (scoring.Config, [*ASKED, "ppl:f", "--limit", "5", "--no-chat"]),
    (scoring.Config, ["--tasks=needle", "--chat", "--seed", "1", "--", "run"]),
]
WRONG = [(scoring.Config, [*ASKED, "--chat", "maybe"]), (Config, ["-x", "3", "--model", "m"])]


def parsed(config, arguments):
    """The fields, or the words of the refusal."""
    try:
        return parsing._parse_flags(config, list(arguments), "sft")
    except ConfigError as error:
        return str(error)


@pytest.fixture
def sizes(monkeypatch):
    """The fields of each parser that is made."""
    each, flags = [], parsing._flags
    monkeypatch.setattr(parsing, "_flags", lambda known: each.append(len(known)) or flags(known))
    return each


@pytest.mark.parametrize("config, arguments", LINES + WRONG)
def test_a_parser_of_what_was_typed_says_what_that_of_all_fields_says(config, arguments, sizes, monkeypatch):
    wrong, every = (config, arguments) in WRONG, len(parsing._every(config))
    short = parsed(config, arguments)
    assert isinstance(short, str) == wrong and sizes[0] <= 6 and sizes[1:] == [every] * wrong
    monkeypatch.setattr(parsing, "_typed", lambda every, arguments: {})
    assert parsed(config, arguments) == short
    assert sizes[-1] == every >= 6  # control arm: the parser of all


def test_a_field_that_the_short_parser_lacks_is_found_by_the_long_one(sizes, monkeypatch):
    """Control arm: a fault in the choice of fields costs time, not an answer."""
    typed = parsing._typed
    monkeypatch.setattr(parsing, "_typed", lambda every, words: dict(list(typed(every, words).items())[1:]))
    assert parsed(*LINES[1])["limit"] == 5 and len(sizes) == 2
    assert parsed(sft.Config, []) == {} and len(sizes) == 2
