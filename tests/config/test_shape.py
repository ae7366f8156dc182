"""[shape] in a file and as flags: further keys, halves of a new model, and the record of runs without one."""

import json

import pytest

from unfreeze.config.parse import parse
from unfreeze.config.pretrain import Config
from unfreeze.config.shape import parsed
from unfreeze.core.errors import ConfigError

FILE = """
tokenizer = "tok"
[shape]
family = "qwen3"
hidden_size = 64
head-dim = 32
rope_theta = 1e6
layer_types = ["full_attention"]
[data]
files = "book.txt"
"""


def read(tmp_path, text, *flags):
    (tmp_path / "run.toml").write_text(text)
    return parse(Config, [str(tmp_path / "run.toml"), *flags], command="pretrain", description="")


def test_a_key_that_is_no_field_is_one_of_config_json(tmp_path):
    config = read(tmp_path, FILE)
    assert config.shape.hidden_size == 64 and config.model == "tok"
    further = {"head_dim": 32, "rope_theta": 1e6, "layer_types": ["full_attention"]}
    assert parsed(config.shape.config) == further


def test_flags_say_the_same(tmp_path):
    flags = "--shape.family llama --shape.hidden-size 32 --shape.config head_dim=16 rope_theta=1e5"
    config = read(tmp_path, 'tokenizer = "tok"\n[data]\nfiles = "b.txt"\n', *flags.split())
    assert (config.shape.family, config.shape.hidden_size) == ("llama", 32)
    assert parsed(config.shape.config) == {"head_dim": 16, "rope_theta": 1e5}


WINDOW = {"at": "layers.*.self_attn", "part": "sliding_window", "window": 64}
IN_A_LINE = 'parts = [{ at = "layers.*.self_attn", part = "sliding_window", window = 64 }]\n'
IN_TABLES = '[[shape.parts]]\nat = "layers.*.self_attn"\npart = "sliding_window"\nwindow = 64\n'


def test_parts_are_tables_of_a_list_tables_of_their_own_or_flags(tmp_path):
    line = read(tmp_path, FILE.replace("[data]", f"{IN_A_LINE}[data]"))
    tables = read(tmp_path, FILE + IN_TABLES)
    flag = read(tmp_path, FILE, "--shape.parts", json.dumps(WINDOW))
    assert line == tables == flag and line.shape.assembly == [WINDOW]
    norm = {"at": "layers.*", "part": "deep_norm"}
    two = read(tmp_path, FILE + IN_TABLES, "--shape.parts", json.dumps(WINDOW), json.dumps(norm))
    assert two.shape.assembly == [WINDOW, norm]  # a flag stands above the file
    assert read(tmp_path, FILE).shape.assembly == []


@pytest.mark.parametrize("wrong", ['parts = "moba"\n', "parts = [3]\n", 'parts = ["[1]"]\n'])
def test_what_is_no_part_is_one_line(tmp_path, wrong):
    with pytest.raises(ConfigError, match="is not a part, such as") as error:
        read(tmp_path, FILE.replace("[data]", f"{wrong}[data]"))
    assert "\n" not in error.value.message


def test_a_page_behind_help(tmp_path, capsys):
    def asked(*arguments):
        parse(Config, [*arguments], command="pretrain", description="", topics={"parts": lambda: "the page"})

    with pytest.raises(SystemExit) as ended:
        asked("--help", "parts")
    assert ended.value.code == 0 and capsys.readouterr().out == "the page\n"
    with pytest.raises(SystemExit):
        asked("--help")
    assert "--shape.family" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no page 'part'; nearest: 'parts'"):
        asked("--help", "part")


@pytest.mark.parametrize(
    "text, words",
    [
        (FILE.replace('tokenizer = "tok"', ""), "needs a tokenizer"),
        (FILE.replace('family = "qwen3"', ""), "shape.hidden_size is for a new model|no family"),
        ('model = "m"\n' + FILE, "has a shape of its own"),
        ('tokenizer = "tok"\n[data]\nfiles = "b.txt"\n', "tokenizer is for a new model"),
        (FILE.replace("= 64", "= 0"), "hidden_size"),
        (FILE.replace("[data]", "[dat]"), "unknown key dat"),
    ],
)
def test_half_a_new_model_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as error:
        read(tmp_path, text)
    assert "\n" not in error.value.message and error.value.next


def test_a_run_without_a_shape_keeps_the_record_that_it_had(tmp_path):
    record = read(tmp_path, 'model = "m"\n[data]\nfiles = "b.txt"\n').record()
    assert not [name for name in record if name.startswith(("shape", "tokenizer"))]
    assert read(tmp_path, FILE).record()["shape.hidden_size"] == 64
