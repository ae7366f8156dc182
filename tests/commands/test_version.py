"""unfreeze --version says what a bug report needs, in two lines, and also where torch is broken."""

import json
import re
import sys

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands import version
from unfreeze.core.source import commit
from unfreeze.kernels.choice.record import device_key


def test_package_commit_torch_and_device(capsys):
    assert cli.main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"unfreeze {unfreeze.__version__} (commit {commit()})"
    assert second.startswith(f"torch {torch.__version__}, ")
    if not torch.cuda.is_available():
        assert re.search(rf" \({device_key(torch.device('cpu'))}, \d+ cores\)$", second)


def test_as_json(capsys):
    assert cli.main(["--version", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known == version.version() and known.keys() == {"version", "commit", "torch", "device"}


def test_gpus_are_counted_by_name(monkeypatch):
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA T4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert version.device() == "2 x NVIDIA H200, NVIDIA T4 (CUDA 13.0)"


@pytest.mark.parametrize("fault", [ImportError, OSError])
def test_a_torch_that_cannot_be_imported_is_said(monkeypatch, capsys, fault):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch":
                raise fault("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "torch cannot be imported: libcudart.so.13: cannot open shared object file"
    )
