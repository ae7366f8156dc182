"""unfreeze export --for gguf|ollama, from the command line: the files, and one line for each bad input."""

import json
import subprocess
import sys
from types import SimpleNamespace

import gguf
import pytest

from tests.compress.gguf.made import checkpoint
from unfreeze import cli
from unfreeze.core import errors
from unfreeze.core.units import format_bytes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint("qwen3", tmp_path_factory.mktemp("export") / "mine")


def test_a_checkpoint_for_ollama(base, tmp_path, capsys):
    assert (
        cli.main(
            ["export", str(base), "--for", "ollama", "--type", "q8_0", "--out", str(tmp_path / "o"), "--json"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    file = tmp_path / "o" / "mine-q8_0.gguf"
    assert result["path"] == str(file) and result["pre"] == "qwen2" and result["bytes"] == file.stat().st_size
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    assert (
        fields["general.architecture"] == "qwen3"
        and fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    )
    assert (
        fields["general.name"] == "mine"
        and len(fields["tokenizer.ggml.tokens"]) == fields["qwen3.vocab_size"]
    )
    text = (tmp_path / "o" / "Modelfile").read_text()
    assert text.startswith("FROM ./mine-q8_0.gguf\nTEMPLATE") and 'PARAMETER stop "<|im_end|>"' in text
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["Modelfile", "mine-q8_0.gguf"]


def refused(arguments, capsys):
    assert cli.main(["export", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_bad_input_has_one_line_each(base, tmp_path, capsys, monkeypatch):
    there = tmp_path / "there.gguf"
    there.write_bytes(b"")
    assert f"{there} exists" in refused([base, "--for", "gguf", "--out", there], capsys)
    assert there.read_bytes() == b""
    (tmp_path / "Modelfile").write_text("FROM other\n")
    assert "Modelfile exists" in refused([base, "--for", "ollama", "--out", tmp_path / "n.gguf"], capsys)
    new = tmp_path / "new.gguf"
    assert "'q4_0' is not one of" in refused([base, "--for", "gguf", "--type", "q4_0"], capsys)
    assert "type is for gguf" in refused([base, "--for", "vllm", "--type", "q8_0"], capsys)
    assert "no adapter: it is a whole model" in refused(
        [base, "--for", "gguf", "--adapter-only", "--out", new], capsys
    )
    assert "ollama needs a whole model" in refused([base, "--for", "ollama", "--adapter-only"], capsys)
    assert "push and base-id are for adapters" in refused([base, "--for", "gguf", "--push", "a/b"], capsys)

    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": 1000})())
    error = refused([base, "--for", "gguf", "--out", new], capsys)
    assert "disk: new.gguf takes" in error and "1000 B free" in error
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in refused([base, "--for", "gguf", "--out", new], capsys)
    assert not new.exists()


def test_the_disk_needs_room_for_the_file_and_no_more(base, tmp_path, capsys, monkeypatch):
    for kind in ("bf16", "q8_0"):
        out = tmp_path / f"{kind}.gguf"
        words = ["export", str(base), "--for", "gguf", "--type", kind, "--out"]
        assert cli.main([*words, str(out)]) == 0
        size = out.stat().st_size
        assert size < 2**20  # control: less than what a bound of 4 MiB asks for
        with monkeypatch.context() as within:
            within.setattr("shutil.disk_usage", lambda _, free=size - 1: SimpleNamespace(free=free))
            error = refused([*words[1:], tmp_path / "less" / "a.gguf"], capsys)
            assert f"a.gguf takes {format_bytes(size)}; {format_bytes(size - 1)} free in" in error
            assert not (tmp_path / "less").exists()
            within.setattr("shutil.disk_usage", lambda _, free=size: SimpleNamespace(free=free))
            assert cli.main([*words, str(tmp_path / f"{kind}-2.gguf")]) == 0
        assert (tmp_path / f"{kind}-2.gguf").read_bytes() == out.read_bytes()


def test_another_family_and_a_model_of_other_parts_are_refused_by_name(tmp_path, capsys):
    from unfreeze.commands.demo import TINY_K2

    for more in (["--out", tmp_path / "k.gguf"], ["--adapter-only"], []):  # before anything else is looked at
        error = refused([TINY_K2, "--for", "gguf", *more], capsys)
        assert "GGUF of model type" in error and "written: llama, mistral" in error
    error = refused(["tiny-k2", "--for", "gguf"], capsys)
    assert "GGUF of model type" in error  # its name is no folder, so --out would be needed


def test_a_family_is_refused_without_torch():
    """At once: the import alone takes two seconds."""
    words = [
        "-c",
        "import sys; from unfreeze import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules)",
    ]
    done = subprocess.run(
        [sys.executable, *words, "export", "tiny-k2", "--for", "gguf"], capture_output=True, text=True
    )
    assert "GGUF of model type" in done.stderr and done.stdout.splitlines()[-1] == "False"


def test_a_run_that_stops_leaves_nothing(base, tmp_path, monkeypatch):
    from unfreeze.compress.gguf import file

    def fails(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(file.os, "replace", fails)
    out = tmp_path / "o" / "m.gguf"
    assert cli.main(["export", str(base), "--for", "gguf", "--out", str(out)]) != 0
    assert list((tmp_path / "o").iterdir()) == [] and errors.UserError
