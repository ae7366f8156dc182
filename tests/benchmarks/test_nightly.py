"""make nightly: what is installed with constraints.txt agrees with it; pip refuses anything else."""

import re
from pathlib import Path

import pytest

from benchmarks import nightly

CONSTRAINTS = Path(nightly.ROOT) / "constraints.txt"


def pins(text):
    """Name as pip compares it -> version."""
    each = re.findall(r"(?:^|\s)([\w.-]+)==([\w.]+)", text)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in each}


def differing(command):
    """Pins of a command that constraints.txt, if it is used, has otherwise."""
    constraints = pins(CONSTRAINTS.read_text(encoding="utf-8")) if CONSTRAINTS.name in command else {}
    return {name for name, version in pins(command).items() if constraints.get(name, version) != version}


@pytest.mark.parametrize("name", nightly.BESIDE)
def test_no_pin_differs_from_the_constraints_it_is_installed_with(name, tmp_path):
    command = next(command for part, command in nightly.parts(0, tmp_path) if part == name)
    steps = [step for step in command.split(" && ") if "pip install" in step]
    assert len(steps) == len(nightly.BESIDE[name]) and not set().union(*map(differing, steps))


def test_control_arm_the_pins_of_a_server_would_be_refused():
    own, others = nightly.BESIDE["vllm"]
    assert differing(f"{nightly.PINNED} {own}") == {"compressed-tensors", "transformers"}
    assert "--no-deps" in own and nightly.PINNED in others
