"""Tiny checkpoints, each made once."""

import pytest

from tests.compress.gguf.made import checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """name of made.MADE -> its checkpoint's folder."""
    folders = {}

    def made(name):
        if name not in folders:
            folders[name] = checkpoint(name, tmp_path_factory.mktemp("gguf") / name)
        return folders[name]

    return made
