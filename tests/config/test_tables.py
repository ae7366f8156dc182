"""What the code before there were tables read and wrote, recorded from it (recorded.json): the same flags give
the same resolved config, record, folder and command, read by the names of today."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from unfreeze.config import pretrain, sft
from unfreeze.config.names import given, name_of, of_today
from unfreeze.config.parse import parse, read_toml
from unfreeze.core.events import RESOLVED
from unfreeze.job.end.folder import write_resolved

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"sft": sft.Config, "pretrain": pretrain.Config}
NEW_FIELD = (
    "the record of a run without new flags must stay what it was, or earlier runs cannot be resumed: say of a new"
    " field about(since=…), or about(computes=False) if nothing that is trained depends on it"
)
RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
NEW_DEFAULTS = {"place.recompute": "auto", "memory.dtype": "auto"}
"""Field -> its default now; a run that goes on keeps its own (tests/job/test_recompute.py, test_precision.py)."""


def with_new_defaults(fields: dict, given: set[str]) -> dict:
    """What code of today records for the same flags. given: the fields that were named."""
    return fields | {name: now for name, now in NEW_DEFAULTS.items() if name not in given}


def test_an_added_field_is_left_out_of_the_record_at_its_default_only():
    plain = sft.Config(model="m", data=sft.Data(files=("d",))).record()
    assert "data.columns" not in plain and "watch.early_stop" not in plain and "optimizer.clip" in plain
    assert "save.every" not in plain
    data = sft.Data(files=("d",), columns=("prompt=q",))
    assert sft.Config(model="m", data=data).record()["data.columns"] == ["prompt=q"]


@pytest.mark.parametrize("before", RECORDED, ids=lambda before: " ".join(before["flags"][4:7]) or "plain")
def test_flat_flags_give_what_they_gave_before_there_were_tables(before, tmp_path):
    config = parse(RECIPES[before["recipe"]], before["flags"], command=before["recipe"], description="")
    write_resolved(SimpleNamespace(path=tmp_path), config, before["recipe"], "2026-11-22")
    # a field that came later is in `resolved` and in no record (since)
    resolved = json.loads((tmp_path / RESOLVED).read_text())
    kind, named = type(config), {name_of(type(config), name) for name in before["given"]}
    then = with_new_defaults(of_today(kind, before["resolved"]), named)
    assert {name: resolved[name] for name in then} == then
    record = with_new_defaults(of_today(kind, before["record"]), named)
    assert json.loads(json.dumps(config.record())) == record, NEW_FIELD
    assert set(given(config)) == named and str(config.run_dir) == before["run_dir"]


FLAT_EXAMPLES = {
    "sft-tiny-k2.toml": """
        model = "src/unfreeze/assets/tiny-k2"
        data = "src/unfreeze/assets/tiny-k2/yoda_train.jsonl"
        out = "runs/tiny-k2-yoda"
        epochs = 10
        tokens_per_step = 1024
        learning_rate = 1e-3
        weight_decay = 0.3
        dtype = "float32"

        [lora]
        rank = 16
        alpha = 32
        targets = ["all-linear"]
        """,
    "tiny-k2/pretrain.toml": """
        model = "build/tiny-k2/model"
        data = "build/tiny-k2/corpus.jsonl"
        out = "build/tiny-k2/pretrained"
        epochs = 12
        tokens_per_step = 2048
        sequence_length = 256
        learning_rate = 0.003
        recompute = "nothing"
        save_every = 200
        samples = 4
        seed = 2
        """,
}
"""The examples as they stood before there were tables."""


@pytest.mark.parametrize("name", FLAT_EXAMPLES)
def test_an_example_in_tables_is_its_flat_twin(name, tmp_path):
    recipe = RECIPES["pretrain" if "pretrain" in name else "sft"]
    twin = tmp_path / "flat.toml"
    twin.write_text(FLAT_EXAMPLES[name])
    made = parse(recipe, [str(ROOT / "examples" / name)], command="x", description="")
    assert made == parse(recipe, [str(twin)], command="x", description="")
    written = read_toml(ROOT / "examples" / name)
    assert {"data", "training", "optimizer"} <= {
        key for key, value in written.items() if isinstance(value, dict)
    }


def test_train_all_has_its_own_rate_and_no_adapters_in_either_spelling(tmp_path):
    for toml in (
        'train = "all"\nclip = 0.5\n[data]\nfiles = "d"\n',
        'data = "d"\ntrain = "all"\n[optimizer]\nclip = 0.5\n',
    ):
        (tmp_path / "run.toml").write_text(f'model = "m"\n{toml}')
        config = parse(sft.Config, [str(tmp_path / "run.toml")], command="sft", description="")
        assert config.optimizer.learning_rate == 2e-5 and config.optimizer.clip == 0.5 and config.lora is None
    made = sft.Config(model="m", data=sft.Data(files=("d",)), train="all", optimizer=sft.Optimizer(clip=0.5))
    assert made.optimizer == sft.Optimizer(clip=0.5, learning_rate=2e-5)
