"""Each family of mixtures gets experts: transformers' logits stay what they were, or the command refuses."""

import warnings

import pytest
import torch
from family_cases import CASES, DOCUMENTS, oracle

from unfreeze import cli

GROWN = {  # case -> experts to add; a router with groups takes whole ones
    "deepseek-v3-groups-yarn": 4,
    "deepseek-v32": 2,
    "glm4-moe": 2,
    "glm-moe-dsa": 2,
    "minimax-m2": 2,
    "mimo-v2-flash": 2,
    "lfm2-moe": 2,
    "kimi-linear": 2,
    "nemotron-h": 2,
}
REFUSED = {
    "mixtral": "has no bias for the choice alone",
    "qwen2-moe": "has no bias for the choice alone",
    "gpt-oss": "has no bias for the choice alone",
    "ernie4-5-moe": "scores by softmax",
    "deepseek-v4": "unchanged",
}


def logits(model_class: type, folder) -> torch.Tensor:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        return torch.cat([model(torch.tensor([document])).logits[0] for document in DOCUMENTS])


@pytest.mark.parametrize("name", GROWN)
def test_added_experts_change_no_logit(name, tmp_path):
    reference = oracle(name)
    reference.save_pretrained(tmp_path / "base")
    more = ["--add-experts", str(GROWN[name]), "--noise", "0.1", "--out", str(tmp_path / "more"), "--quiet"]
    assert cli.main(["upcycle", str(tmp_path / "base"), *more]) == 0
    before, after = (logits(type(reference), tmp_path / folder) for folder in ("base", "more"))
    assert before.abs().max() > 1
    assert (after - before).abs().max() <= 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_could_be_chosen_are_refused(name, tmp_path, capsys):
    found = next(case for case in CASES if case.startswith(name))
    oracle(found).save_pretrained(tmp_path / "base")
    assert (
        cli.main(["upcycle", str(tmp_path / "base"), "--add-experts", "2", "--out", str(tmp_path / "out")])
        == 2
    )
    assert REFUSED[name] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
