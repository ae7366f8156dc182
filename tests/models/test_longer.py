"""More positions than a model was trained on: transformers reads the config.json we write, with our logits."""

import json

import pytest
import torch
import transformers
from family_cases import batch_of, oracle

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.core.longer import Longer
from unfreeze.generate.open import open_model
from unfreeze.models.longer import config_for, fields_of

PLAIN = (
    *(
        "llama",
        "qwen2-tied",
        "qwen3",
        "mistral",
        "ministral-mixed",
        "granite",
        "seed-oss",
        "smollm3",
        "olmo2",
    ),
    *("mistral3", "qwen3-vl", "gemma2-window", "gemma3-window", "gemma3-nested", "qwen3-moe", "deepseek-v3"),
    *("glm4-moe", "qwen2-moe", "mixtral", "deepseek-v2", "ernie4-5-moe", "minimax-m2", "granitemoe"),
    *("qwen3-vl-moe", "olmo3-plain"),
)
ALL_THREE = ("llama", "qwen3-vl", "gemma3-nested", "deepseek-v3", "glm4-moe")
NTK = ("phi3", "nanochat", "llama4-nested", "mimo-v2-flash")
HYBRIDS = ("granite4-dense-rotated-limits-tied", "lfm2", "lfm2-moe", "qwen3.5-nested-tied", "qwen3-next")
DOCUMENT = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(3)).tolist()
"""Longer than the 256 positions of the models."""


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *((name, "yarn") for name in (*PLAIN, *HYBRIDS)),
        *((name, scaling) for name in ALL_THREE for scaling in ("linear", "ntk")),
        *((name, "ntk") for name in NTK),
    ],
)
def test_transformers_reads_it_and_has_our_logits_beyond_the_old_positions(name, scaling, tmp_path):
    reference = oracle(name)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config_for(config, Longer(scaling, 8.0))))
    theirs = (
        type(reference).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    )
    ours = open_model(open_checkpoint(tmp_path))
    assert ours.shape.max_positions == 2048 == theirs.config.get_text_config().max_position_embeddings
    with torch.no_grad():
        expected, before = (model(torch.tensor([DOCUMENT])).logits[0] for model in (theirs, reference))
        actual = ours.logits(ours.hidden(batch_of([DOCUMENT])))
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert (actual - before).abs().max() > 1e-3 * size  # control: without the scaling it is another model


@pytest.mark.parametrize("scaling", ["yarn", "linear", "ntk"])
@pytest.mark.parametrize("name", ["llama", "qwen3-vl", "gemma3-window", "glm4-moe", "olmo3-plain"])
def test_either_spelling_alone_says_the_same(name, scaling, tmp_path):
    """Versions before 5 read rope_theta and rope_scaling, 5 reads rope_parameters."""
    oracle(name).config.save_pretrained(tmp_path)
    written = config_for(json.loads((tmp_path / "config.json").read_text()), Longer(scaling, 4.0))

    def without(*names):
        text = {
            key: value for key, value in (written.get("text_config") or written).items() if key not in names
        }
        return {**written, "text_config": text} if "text_config" in written else text

    old, new = without("rope_parameters"), without("rope_theta", "rope_scaling", "rope_local_base_freq")
    tables = []
    for number, config in enumerate((written, old, new)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        table = transformers.AutoConfig.from_pretrained(folder).get_text_config().rope_parameters
        inner = [table, *(value for value in table.values() if isinstance(value, dict))]
        for each in inner:
            each.pop("type", None)
        tables.append(table)
    assert tables[0] == tables[1] == tables[2]
    ropes = [(models.shape(config).rope, dict(models.shape(config).ropes)) for config in (written, old, new)]
    assert ropes[0] == ropes[1] == ropes[2]


@pytest.mark.parametrize(
    ("name", "scaling", "says"),
    [
        ("llama-3-rope-biases", "yarn", "factor 8.0"),
        ("phi3-longrope-tied", "ntk", "rope_type longrope"),
        ("deepseek-v3-groups-yarn", "linear", "original_max_position_embeddings 64"),
        ("gpt-oss", "yarn", "factor 32.0"),
        ("gemma4-window", "yarn", "rope_type proportional"),
        ("gemma3-linear-softcap", "yarn", "rope_type linear"),
        ("phi3", "yarn", "yarn is not built for phi3; built: ntk"),
        ("nemotron-h", "yarn", "nothing rotates in this nemotron_h"),
        ("kimi-linear", "ntk", "nothing rotates in this kimi_linear"),
        ("granite4", "linear", "nothing rotates in this granitemoehybrid"),
        ("nanochat", "yarn", "yarn is not built for nanochat; built: linear, ntk"),
        ("mimo-v2-flash", "linear", "linear is not built for mimo_v2_flash; built: ntk"),
        ("granite4", "yarn", "nothing rotates in this granitemoehybrid"),
        ("nemotron-h", "ntk", "nothing rotates in this nemotron_h"),
        ("kimi-linear", "linear", "nothing rotates in this kimi_linear"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_its_values(name, scaling, says):
    with pytest.raises(ConfigError) as error:
        config_for(oracle(name).config.to_dict(), Longer(scaling, 4.0))
    assert says in error.value.message and error.value.next


def test_norms_after_the_rotation_take_yarns_factor_away_so_it_is_refused():
    """transformers norms q and k of nanochat after they turn; before this was refused, logits were 2 apart."""
    config = oracle("nanochat").config.to_dict()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match="another size than 1"):
        models.shape({**config, "rope_parameters": yarn})
    assert models.shape({**config, "rope_parameters": {**yarn, "attention_factor": 1.0}}).rope.computed


def test_the_fields_it_writes_are_all_that_differs():
    config = oracle("gemma3-nested").config.to_dict()
    written = config_for(config, Longer("yarn", 4.0))
    assert {**written, "text_config": {**written["text_config"], **fields_of(config)}} == {
        **config,
        "text_config": {**config["text_config"], **fields_of(written), **fields_of(config)},
    }
    assert fields_of(written)["rope_local_base_freq"] == 1e4
