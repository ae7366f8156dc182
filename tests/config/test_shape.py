"""[shape] in a file and as flags: further keys, halves of a new model, and the record of runs without one."""

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
