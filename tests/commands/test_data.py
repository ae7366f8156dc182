"""unfreeze data: dispatches to show and clean, and helps with both."""

import pytest

from unfreeze import cli


@pytest.fixture
def unfreeze(capsys):
    """`unfreeze …` -> what it prints on both streams; it must end with `code`."""

    def run(*arguments, code=0):
        try:
            ended = cli.main([*map(str, arguments)])
        except SystemExit as end:
            ended = end.code or 0
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.out + printed.err

    return run


def test_help_of_both_commands(unfreeze):
    assert "--recipe" in unfreeze("data", "clean", "--help")
    assert "--sequence-length" in unfreeze("data", "show", "--help")
    both = unfreeze("data", "--help")
    assert "data show" in both and "data clean" in both
    assert "nearest: 'clean'" in unfreeze("data", "claen", code=2)
