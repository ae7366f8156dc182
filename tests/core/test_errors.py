"""A message can be printed anywhere, whatever the file it quotes holds."""

import pytest

from unfreeze.core.errors import LONGEST, CheckpointError, UserError, nearest, printable


@pytest.mark.parametrize(
    "text, shown",
    [
        ("Größe 16 → 32", "Größe 16 → 32"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\ud800", r"\ud800"),
        ("\u202eabc", r"\u202eabc"),
        ("\u2028\x85", r"\u2028\x85"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text, shown):
    error = CheckpointError(f"name {text} is wrong", next=f"rm {text}")
    assert error.message == f"name {shown} is wrong" and error.next == f"rm {shown}"
    assert str(error) == f"name {shown} is wrong\n  next: rm {shown}"
    str(error).encode()  # control: the text itself may not be encodable


def test_a_message_is_cut_in_its_middle():
    message = UserError("begin " + "x" * 10**6 + " end").message
    assert len(message) <= LONGEST and message.startswith("begin x") and message.endswith("x end")
    assert len(printable("\x00" * LONGEST)) <= LONGEST


def test_nearest():
    assert nearest("rnak", ["rank", "alpha"]) == "; nearest: 'rank'" and nearest("zzz", ["rank"]) == ""
