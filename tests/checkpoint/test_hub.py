"""Claims about Hub ids: only safe files are asked for, and each failure is one line with the next command. No
network: the client is replaced."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from unfreeze.checkpoint import hub, open_checkpoint
from unfreeze.checkpoint.folder import asks_hub, near_folder
from unfreeze.core.errors import CheckpointError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("moonshotai/Kimi-K2-Thinking", True),
        ("name", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("/a/b", False),
        ("~/b", False),
        ("../b", False),
        ("a/", False),
    ],
)
def test_what_is_an_id(text: str, expected: bool) -> None:
    assert hub.is_id(text) is expected


def test_download_asks_for_weights_and_text_files_only(
    tmp_path: Path, kimi, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict = {}
    kimi.write(tmp_path, kimi.tensors())
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo_id, **options: asked.update(options, id=repo_id) or str(tmp_path),
    )
    said: list[str] = []
    manifest = open_checkpoint("org/name", progress=said.append)
    assert manifest.path == tmp_path and asked["id"] == "org/name" and "org/name" in said[0]

    def wanted(name: str) -> bool:
        return any(fnmatch(name, p) for p in asked["allow_patterns"]) and not any(
            fnmatch(name, p) for p in asked["ignore_patterns"]
        )

    assert all(
        map(
            wanted,
            [
                "model-00001-of-00062.safetensors",
                "config.json",
                "tiktoken.model",
                "chat_template.jinja",
                "tokenizer.json",
            ],
        )
    )
    assert not any(
        map(
            wanted,
            [
                "pytorch_model.bin",
                "x.pt",
                "modeling_kimi.py",
                "consolidated.safetensors",
                "original/a.safetensors",
            ],
        )
    )


@pytest.mark.parametrize(
    "failure",
    [LocalEntryNotFoundError("long text"), OfflineModeIsEnabled("offline"), ConnectionError("refused")],
)
def test_offline_is_one_clear_line(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("org/name")
    assert (
        "offline?" in caught.value.message
        and "\n" not in caught.value.message
        and "resumes" in caught.value.next
    )


def test_other_failures_are_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("No space left on device\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        open_checkpoint("org/name")
    assert "\n" not in caught.value.message


def test_a_path_that_is_missing_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "models/b", "mine", "../a/b", "tiny-k2", "Qwen"):
        assert not asks_hub(name), name
    assert asks_hub("Qwen/Qwen3-0.6B")
    (tmp_path / "work" / "a").mkdir(parents=True)
    assert not asks_hub("work/b") and not asks_hub("wrok/a") and asks_hub("org/a")
    assert near_folder(Path("wrok/a")) == Path("work/a") and near_folder(Path("work/zzz")) is None
    # a folder with checkpoints may be named after their publisher
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "Qwen" / "Qwen3-0.6B" / "config.json").write_text("{}")
    assert not asks_hub("Qwen/Qwen3-0.6B") and asks_hub("Qwen/Qwen3-8B")
