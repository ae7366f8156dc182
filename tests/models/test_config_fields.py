"""One field of config.json changed at a time: followed as transformers follows it, refused, or named; none
silent.

The engine and the whole table are benchmarks/configs.py's, over published configs; here a config of each kind
and what changes numbers.
"""

import pytest
from cases_kimi_lfm2 import READ
from family_cases import CONFIGS

from unfreeze import models
from unfreeze.models import allowed

ADDED = {  # fields once passed over in silence, and two that nobody follows
    "is_causal",
    "layer_types",
    "partial_rotary_factor",
    "rope_interleave",
    "head_dim",
    "sliding_window",
    "original_max_position_embeddings",
    "per_layer_config",
    "num_local_experts",
    "logits_scaling",
    "attention_dropout",
    "use_sliding_window",
    "routed_scaling_factor",
    "norm_topk_prob",
}


DAILY = {
    "qwen3",
    "phi3",
    "gemma3_text",
    "mistral4",
    "kimi_k2",
    "gpt_oss",
    "deepseek_v4",
    "qwen3_next",
    "nemotron_h",
    "lfm2_moe",
}
FOLLOWED = {  # where no layer rotates and the norms' eps has another name
    "nemotron_h": {"layer_norm_epsilon", "time_step_limit", "routed_scaling_factor", "n_group"}
}


def verdicts(bench, model_type, folder, only=None) -> dict[str, str]:
    given = CONFIGS[model_type]
    config = bench.tiny(given if "text_config" in given else {**given, "model_type": model_type})
    made = bench.Bench(config, folder)
    found = {}
    for change in bench.changes(config):
        if change.field in bench.ADDED and change.field not in config and change.field not in ADDED:
            continue
        if only is None or change.field in only:
            found[f"{change.field} {'absent' if change.value is bench.ABSENT else change.value}"] = (
                made.judge(change)
            )
    return found


def without_config(families, configs) -> list[str]:
    """Family files of which no model_type has a config here; transformers follows no field of our own."""
    theirs = {family for model_type, family in families.items() if model_type not in models.ONLY_HERE}
    missing = theirs - {families[model_type] for model_type in configs}
    return sorted(f"{family.__name__.replace('.', '/')}.py" for family in missing)


def test_every_family_has_a_config_here():
    missing = without_config(models.FAMILIES, CONFIGS)
    assert not missing, (
        f"no config of {missing} has its fields changed: add one to CONFIGS in tests/models/cases_dense.py or cases_moe.py"
    )


def test_control_a_family_without_a_config_is_seen():
    rest = {model_type: config for model_type, config in CONFIGS.items() if model_type != "qwen3"}
    assert "unfreeze/models/qwen3.py" in without_config(models.FAMILIES, rest)


# one of each kind in the suite; the others nightly: a second and more each
EACH = [
    model_type if model_type in DAILY else pytest.param(model_type, marks=pytest.mark.nightly)
    for model_type in CONFIGS
]


def test_the_families_of_the_suite_have_a_config():
    assert CONFIGS.keys() >= DAILY and len(EACH) == len(CONFIGS)


@pytest.mark.parametrize("model_type", EACH)
def test_no_change_is_silent_and_what_moves_the_numbers_is_followed(bench, model_type, tmp_path):
    found = verdicts(bench, model_type, tmp_path)
    assert {field: words for field, (verdict, words) in found.items() if verdict == "SILENT"} == {}
    followed = {
        field.split()[0].split(".")[-1] for field, (verdict, _) in found.items() if verdict == "followed"
    }
    assert {**READ, **FOLLOWED}.get(model_type, {"rope_theta", "rms_norm_eps"}) <= followed
    if model_type == "kimi_k2":
        assert {
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "norm_topk_prob",
            "num_experts_per_tok",
            "rope_interleave",
        } <= followed
        assert all(found[f"{field} absent"][0] == "followed" for field in ("topk_group", "rope_theta"))
        assert "num_experts_per_tok 8 is more than the 4 experts" in found["num_experts_per_tok absent"][1]
        assert (
            found["n_group absent"][0] == "refused"
            and "n_group 8 is one expert per group" in found["n_group absent"][1]
        )
        assert found["routed_scaling_factor absent"][0] == "no effect"  # 2.5 is what it means


def test_control_with_the_lists_emptied_the_same_changes_are_silent(bench, tmp_path, monkeypatch):
    only = {"is_causal", "layer_types"}
    monkeypatch.setattr(allowed, "ONLY", {})
    monkeypatch.setattr(models, "unknown", lambda config, table: [])
    found = verdicts(bench, "qwen2", tmp_path, only)
    assert len(found) == 2 and {verdict for verdict, _ in found.values()} == {"SILENT"}
