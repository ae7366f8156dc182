"""The lines of `doctor --gpu` about a card and its software, one fault each, and clean ones beside them."""

from dataclasses import replace

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.job.doctor import gpu
from unfreeze.kernels import cards
from unfreeze.kernels.choice import ops, record
from unfreeze.kernels.choice.timed import Cell

CARD = cards.Card("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, "580.65", "CUDA 13.0", ("sm_90",))
GIB = 1 << 30


def lines(card=CARD, free=79 * GIB, total=80 * GIB):
    return list(gpu.card_findings(card, 0, free, total))


def test_a_free_card_is_ok():
    (finding,) = lines()
    assert finding.level == "ok" and finding.line == (
        "NVIDIA H100 80GB HBM3, compute capability 9.0, CUDA 13.0, driver 580.65, 79.0 GiB of 80.0 GiB free"
    )


def test_a_card_that_others_fill_is_a_warning_with_the_size():
    (finding,) = lines(free=20 * GIB)
    assert finding.level == "warn" and "other processes hold 60.0 GiB" in finding.line
    assert "nvidia-smi" in finding.remedy


def test_slices_rocm_and_old_cards_are_told_apart():
    assert "a MIG slice" in lines(replace(CARD, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"))[0].line
    assert "nobody has tried ROCm" in lines(replace(CARD, runtime="ROCm 6.4"))[0].line
    assert "float32 and plain torch only" in lines(replace(CARD, capability=(7, 5), built=()))[0].line
    (old,) = lines(replace(CARD, capability=(6, 1)))
    assert old.level == "fault" and old.remedy == "--device cpu"


def test_a_kernel_that_fails_while_its_parameters_are_measured_is_a_row_of_the_table(monkeypatch):
    def fails(*_):
        raise RuntimeError("PassManager::run failed")

    def checked(cells, device, seconds, tune):
        for cell in cells:
            tune(cell)
            yield {"op": cell.op.name, "wrong": {"triton": "PassManager::run failed"}}

    kept = []
    monkeypatch.setattr(gpu.configs, "measure_all", fails)
    monkeypatch.setattr(gpu.checked, "check_all", checked)
    monkeypatch.setattr(gpu.times, "keep", lambda rows, device, checks: kept.extend(rows))
    norm = ops.import_op("rms_norm")
    cell = Cell(norm, norm.cases[0], torch.float32)
    assert list(gpu.table([cell], torch.device("cuda", 0))) == kept != []


def test_rows_are_kept_if_a_kernel_takes_the_card_down(monkeypatch):
    def checked(cells, device, seconds, tune):
        yield {"op": "swiglu", "wrong": {"triton": "an illegal memory access"}}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kept = []
    monkeypatch.setattr(gpu.checked, "check_all", checked)
    monkeypatch.setattr(gpu.times, "keep", lambda rows, device, checks: kept.extend(rows))
    with pytest.raises(RuntimeError):
        list(gpu.table([], torch.device("cuda", 0)))
    assert [row["op"] for row in kept] == ["swiglu"]


@pytest.fixture
def with_card(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(cards, "card_of", lambda device: CARD)
    monkeypatch.setattr(record, "device_key", lambda device: "nvidia-h100")
    record.read.cache_clear()
    yield tmp_path
    record.read.cache_clear()


def levels():
    return {finding.check: finding for finding in gpu.gpu_findings()}


def test_a_good_machine_has_only_ok(with_card, monkeypatch):
    monkeypatch.setattr(cards, "triton_version", lambda: "3.7.1")
    found = levels()
    assert found.keys() == {"gpu 0", "gpu 1", "triton", "cache"}
    assert {finding.level for finding in found.values()} == {"ok"}


def test_no_triton_an_unwritable_cache_and_a_damaged_record_are_a_line_each(with_card, monkeypatch):
    monkeypatch.setattr(cards, "triton_version", lambda: "")
    folder = with_card / "cache" / "unfreeze" / "kernels"
    folder.mkdir(parents=True)
    (folder / "nvidia-h100.json").write_text("{torn")
    found = levels()
    assert found["triton"].level == "warn" and found["triton"].remedy == "pip install triton"
    assert found["records"].level == "warn" and "is not read" in found["records"].line
    (with_card / "blocked").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_card / "blocked"))
    found = levels()
    assert found["cache"].level == "warn" and "XDG_CACHE_HOME" in found["cache"].remedy


def test_a_damaged_record_of_the_user_stops_no_run(with_card, caplog):
    """The reference or a predicted kernel runs; writing to the file is still refused."""
    folder = with_card / "cache" / "unfreeze" / "kernels"
    folder.mkdir(parents=True)
    (folder / "nvidia-h100.json").write_text("{torn")
    norm = ops.import_op("rms_norm")
    for _ in range(2):
        assert record.record_rows(norm, torch.device("cuda", 0), torch.float32, "many") == []
    assert len(caplog.records) == 1 and "not read" in caplog.text
    committed = {"op": "rms_norm", "dtype": "float32", "bucket": "many", "candidate": "triton"}
    assert not record.is_own(committed, "nvidia-h100")
    with pytest.raises(ConfigError, match="no valid kernel records"):
        record.write(folder / "nvidia-h100.json", [], {})
