"""What a model computed stays, and is no other model's."""

from __future__ import annotations

from unfreeze.evaluate.kept import Kept


def test_values_survive_and_belong_to_one_model_and_question(tmp_path):
    path = tmp_path / "kept.jsonl"
    with Kept(path, "a") as kept:
        key = kept.key("answer", [1, 2], 8)
        assert kept.get(key) is None
        kept.put(key, ["Oslo", "end"])
        again = Kept(path, "a")  # a kill now: what was put is on disk
        assert again.get(key) == ["Oslo", "end"] and len(again) == 1
    others = {
        Kept(None, "b").key("answer", [1, 2], 8),
        kept.key("answer", [1, 2], 9),
        kept.key("answer", [1], 8),
    }
    assert key not in others and len(others) == 3
    kept.model = "b"
    assert kept.get(kept.key("answer", [1, 2], 8)) is None


def test_a_torn_or_damaged_line_is_computed_again(tmp_path):
    path = tmp_path / "kept.jsonl"
    with Kept(path, "a") as kept:
        kept.put("one", 1.5)
    whole = path.read_bytes()
    path.write_bytes(b"not JSON\n" + whole + b'{"key": "two", "va')
    with Kept(path, "a") as kept:
        assert kept.get("one") == 1.5 and len(kept) == 1
        kept.put("three", [0.1])
    assert len(Kept(path)) == 2 and path.read_bytes().count(b"\n") == 3
    assert Kept().path is None and len(Kept()) == 0
