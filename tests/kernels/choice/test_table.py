"""What runs in one run: which cells are timed for it, and the table that all its processes take."""

import json

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice import choose, table, times
from unfreeze.kernels.choice.op import Candidate
from unfreeze.kernels.expand.cases import KERNELS, buckets
from unfreeze.kernels.expert_mlp import packed_op
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4

F32, BF16 = torch.float32, torch.bfloat16


def asked(dtype=F32, lengths=(), *, narrow=False, experts=False, codecs=()):
    cells = table.cells(dtype, lengths, narrow=narrow, experts=experts, codecs=codecs)
    return [(cell.op.name, cell.case.bucket) for cell in cells]


def test_attention_is_timed_where_the_documents_are():
    lengths = [1500] * 2 + [300] * 20 + [40] * 100 + [100]  # 3,000 + 6,000 + 4,000 + 100 tokens
    assert [bucket for op, bucket in asked(lengths=lengths) if op == "attention"] == ["192 on", "1024 on"]
    assert [bucket for op, bucket in asked(lengths=lengths, narrow=True) if op == "attention"] == [
        "192 on, v < d",
        "1024 on, v < d",
    ]
    assert not any(op == "attention" for op, _ in asked(lengths=[40] * 100))


def test_packed_weights_are_timed_in_their_own_format():
    assert [bucket for op, bucket in asked(codecs=[Int4(32)]) if op == "expand"] == ["small", "large"]
    assert [bucket for op, bucket in asked(codecs=[Fp8()]) if op == "expand"] == ["small, fp8", "large, fp8"]
    assert not any(op in ("expand", "packed_experts") for op, _ in asked(experts=True))


def test_on_a_gpu_every_format_of_the_run_is_checked(monkeypatch):
    """The CPU's loops know three formats, Triton's kernels all: a run in NF4 checks NF4's."""
    monkeypatch.setattr(table, "running", lambda *_: ["triton"])
    for kind, kernel in KERNELS.items():
        cells = table.cells(
            BF16, [], narrow=False, experts=True, codecs=[kernel.codec], device=torch.device("cuda")
        )
        assert set(buckets(kind)) <= {cell.case.bucket for cell in cells if cell.op.name == "expand"}, kind
        kinds_of_base = {cell.case.bucket for cell in cells if cell.op.name == "expert_mlp"}
        assert kinds_of_base == {"under 64", "64 on"}, kind


def test_what_dominates_comes_first(monkeypatch):
    anywhere = Candidate(lambda: None, lambda *_: "")
    monkeypatch.setitem(packed_op().candidates, "panels", anywhere)  # with AVX512-bf16 or without
    names = [op for op, _ in asked(BF16, [1500], experts=True, codecs=[Int4(32)])]
    assert names[:3] == ["packed_experts", "attention", "expand"] and "few_rows" in names


def test_nothing_is_timed_twice_nor_where_the_choice_is_fixed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    times._read.cache_clear()
    timed = []

    def planted(cells, **_):
        timed.append([cell.key for cell in cells])
        return [
            dict(zip(("op", "dtype", "bucket"), cell.key, strict=True))
            | {"runs": "reference", "us": {"reference": 1.0}, "wrong": {}, "untimed": "", "date": ""}
            for cell in cells
        ]

    monkeypatch.setattr(table, "time_all", planted)
    cells = table.cells(F32, [300], narrow=False, experts=False, codecs=())
    monkeypatch.setenv("UNFREEZE_KERNELS", "records")
    assert table.time_missing(cells) == []
    monkeypatch.delenv("UNFREEZE_KERNELS")
    begun = []
    assert (
        len(table.time_missing(cells[1:], lambda: begun.append(1)))
        == len(cells) - 1
        == len(cells) - len(begun)
    )
    assert len(table.time_missing(cells)) == 1
    assert table.time_missing(cells, lambda: begun.append(1)) == [] and begun == [1]
    assert timed == [[cell.key for cell in cells[1:]], [cells[0].key]]
    times._read.cache_clear()


def test_a_kernel_that_takes_the_card_down_is_banned_at_the_next_start(monkeypatch):
    """After an illegal access to memory every call of CUDA fails; what was found until then is kept."""

    def planted(cells, device, seconds):
        yield {"op": "swiglu", "wrong": {"triton": "an illegal memory access"}}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kept = []
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    monkeypatch.setattr(table, "check_all", planted)
    monkeypatch.setattr(times, "tried", lambda device: {})
    monkeypatch.setattr(times, "keep", lambda rows, device: kept.extend(rows))
    cells = table.cells(F32, [], narrow=False, experts=False, codecs=())
    with pytest.raises(RuntimeError):
        table.time_missing(cells, device=torch.device("cuda", 0))
    assert [row["op"] for row in kept] == ["swiglu"]


def test_a_table_is_what_runs_and_comes_back_from_its_file(tmp_path):
    rows = table.made(F32)
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {"attention", "packed_experts", "adamw"} <= {row["op"] for row in rows}
    swapped = [row | {"runs": "reference"} for row in rows if row["op"] == "rotary"]
    (tmp_path / "kernels.json").write_text(json.dumps(swapped))
    assert table.take(table.read(tmp_path / "kernels.json")) == []
    rotary = next(op for op in table.all_ops() if op.name == "rotary")
    for case in rotary.cases:
        assert choose.by_record(rotary, table.CPU, F32, case.bucket).runs == "reference"
    assert table.take([row | {"runs": "of another version", "op": "gone"} for row in rows]) == []


# a row with every field, one of which is no text
LISTED = '[{"op": [], "bucket": "b", "dtype": "d", "runs": "r", "origin": "o", "why": "w"}]'


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '[{"op": "rotary"}]', LISTED, "[" * 100_000])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "kernels.json").write_text(text)
    with pytest.raises(ConfigError, match=r"kernels\.json does not say which kernels run"):
        table.read(tmp_path / "kernels.json")
