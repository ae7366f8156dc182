"""Every family's config.json with a few values replaced: read, or refused in one error. No other exception."""

import json
import sys
from pathlib import Path
from random import Random

from family_cases import CASES, CONFIGS, NO_IDS, SMALL

from unfreeze import models
from unfreeze.core.errors import UserError
from unfreeze.models import mistral

sys.path.append(str(Path(__file__).resolve().parents[1] / "fuzz"))
from fuzzers import altered


def configs() -> dict[str, dict]:
    """A config of each case and family, as JSON has it."""
    made = {name: case.made({**SMALL, **NO_IDS}).to_dict() for name, case in CASES.items()}
    usual = {
        name: given if "text_config" in given else {**given, "model_type": name}
        for name, given in CONFIGS.items()
    }
    return {name: json.loads(json.dumps(config)) for name, config in (made | usual).items()}


def findings(rounds: int) -> set[str]:
    """Exceptions that are no UserError."""
    random, found = Random(0), set()
    for name, config in configs().items():
        for _ in range(rounds):
            mutated = altered(random, config, random.choice((1, 1, 2)))
            try:
                models.ignored(models.shape(mutated))
                models.notes(mutated)
            except UserError:
                continue
            except Exception as error:
                found.add(f"{name}: {type(error).__name__}: {error}")
    return found


def test_a_mutated_config_is_read_or_refused():
    assert findings(rounds=20) == set()


def test_control_a_reader_that_trusts_a_field_is_found(monkeypatch):
    def trusting(config):
        return (config["sliding_window"] + 1,)

    monkeypatch.setattr(mistral, "everywhere", trusting)  # null is no number
    assert any("mistral" in finding for finding in findings(rounds=2))
