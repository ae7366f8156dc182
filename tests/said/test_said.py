"""What the program says, word for word: tests/said/<group>.txt is what the session records today.

A sentence that changes is one diff there, to be reviewed. To make the files anew:
    pytest tests/said --update-said
"""

import difflib
from pathlib import Path

import pytest
import said_session

FOLDER = Path(__file__).parent
RECORDED = {group: FOLDER / f"{group}.txt" for group in said_session.GROUPS}
ENOUGH = 60  # refusals


def changed(before: str, after: str) -> str:
    """The lines that differ, as a diff; "" where none does."""
    return "\n".join(
        difflib.unified_diff(before.splitlines(), after.splitlines(), "recorded", "today", lineterm="")
    )


@pytest.mark.parametrize("group", said_session.GROUPS)
def test_the_session_says_what_is_recorded(group, here, request):
    file, text = RECORDED[group], said_session.recorded(group, here)
    if request.config.getoption("--update-said"):
        file.write_text(text, encoding="utf-8")
    diff = changed(file.read_text(encoding="utf-8") if file.exists() else "", text)
    assert not diff, f"if that is meant: pytest tests/said --update-said, and review the diff\n{diff}"


def test_control_arm_another_word_or_another_exit_code_is_a_diff():
    text = RECORDED["words"].read_text(encoding="utf-8")
    assert changed(text, text) == ""
    assert "+ConfigError: no command 'inspekt'" in changed(
        text, text.replace("there is no command", "no command")
    )
    assert "-[2]\n+[1]" in changed(text, text.replace("[2]", "[1]", 1))


def test_what_is_recorded_is_enough_and_holds_no_fault_of_the_program():
    sections = [
        section for file in RECORDED.values() for section in file.read_text(encoding="utf-8").split("\n\n$ ")
    ]
    refused = [section for section in sections if section.rstrip().endswith("\n[2]")]
    assert len(refused) >= ENOUGH
    assert not [section for section in sections if "\nfault: " in section or "Traceback" in section]
    assert {section.rstrip()[-3:] for section in sections} == {"[0]", "[2]"}


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        (
            "loaded 2.4 MB at 0.46 GB/s (4.1 MB unpacked); preparing step 1 (compiles once)",
            "loaded # bytes at # bytes/s (# bytes unpacked); preparing",
        ),
        ("loaded 2.4 MB at 9.1 GB/s; 2 kernels predicted", "loaded # bytes at # bytes/s; preparing"),
        ("memory: 343.7 MiB to 1.1 GiB of 21 GiB", "memory: # bytes of # bytes"),
        ("  total                 1,021.0 MiB", "  total # bytes"),
        ("epoch 1.0  loss 7.192  12 tokens/s", "epoch #  loss # # tokens/s"),
        ("in 1 min 5 s: loss 7.192 → 7.063", "in # s: loss # → #"),
        ("load  1.0 MB of 2.0 MB\nstep 1/2", "step 1/2"),
    ],
)
def test_what_differs_between_machines_is_a_sign(line, sign):
    for pattern, replacement in [*said_session.MACHINE, said_session.FIGURES]:
        line = pattern.sub(replacement, line)
    assert line == sign
