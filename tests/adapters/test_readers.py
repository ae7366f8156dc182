"""Our exports as vLLM's and SGLang's own loading code reads them: recorded from that code, with its version,
by benchmarks/reader_vectors.py. A record is of files: their sha256 says that ours are still the ones read."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from unfreeze.adapters import LoraConfig, sites, verify_adapter
from unfreeze.adapters.layouts import dropped, projections, save_adapter
from unfreeze.adapters.lora import LowRank
from unfreeze.adapters.readers import READERS, SGLANG, VLLM
from unfreeze.core.errors import AdapterError

RECORDS = Path(__file__).parent / "read_by"
spec = importlib.util.spec_from_file_location(
    "reader_vectors", Path(__file__).parents[2] / "benchmarks" / "reader_vectors.py"
)
reader_vectors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader_vectors)

RECORDED = {name: json.loads((RECORDS / f"{name}.json").read_text()) for name in ("vllm", "sglang")}


def changes(model):
    """layer -> ΔW·v of what the model trained, in float64."""
    found = {}
    for site in sites(model):
        if isinstance(site.adapter, LowRank):
            pairs = {site.name: (site.adapter.A[None], site.adapter.B[None], site.adapter.scale)}
        else:
            pairs = {f"{site.name}.{name}": pair for name, pair in projections(site.adapter).items()}
        for name, (A, B, scale) in pairs.items():
            for e in range(len(A)):
                key = name if len(A) == 1 else ".{}.".join(name.rsplit(".", 1)).format(e)
                v = reader_vectors.probe(A.shape[2])
                found[key] = scale * (B[e].double() @ (A[e].double() @ v))
    return found


@pytest.mark.parametrize("case", reader_vectors.CASES)
@pytest.mark.parametrize("reader", RECORDED)
def test_a_reader_applies_what_was_trained_or_the_export_says_that_it_does_not(reader, case, tmp_path):
    record = RECORDED[reader]["cases"][case]
    assert READERS[reader].version == RECORDED[reader]["version"]
    model = reader_vectors.made(case)
    left_out = dropped(model, READERS[reader])
    # these files are what the reader's code was given
    assert reader_vectors.export(case, reader, tmp_path) == record["sha256"], "record the readers again"
    theirs, ours = (
        {k: torch.tensor(v, dtype=torch.float64) for k, v in record["layers"].items()},
        changes(model),
    )
    for name, change in ours.items():
        if name not in left_out:
            assert (theirs[name] - change).abs().max() <= 1e-6 * change.abs().max(), name
            assert change.any()
    assert not any(theirs[name].any() for name in theirs.keys() - ours.keys())  # zeros beside what is fused
    assert not theirs.keys() & left_out.keys()
    verify_adapter(model, tmp_path, without=left_out)


def test_what_is_left_out_is_known_by_the_model():
    assert set(dropped(reader_vectors.made("mla"), VLLM)) == {
        f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)
    }
    assert "48974" in VLLM.drops[0].issue and not dropped(reader_vectors.made("mla"), SGLANG)
    assert not dropped(reader_vectors.made("llama"), VLLM)
    leaves = {name.rsplit(".", 1)[-1] for name in dropped(reader_vectors.made("mla-no-q-rank"), SGLANG)}
    assert leaves == {"q_proj", "kv_a_proj_with_mqa"}
    assert VLLM.room_for(16) == "" and VLLM.room_for(20) == "--max-lora-rank 32" == VLLM.room_for(32)


def test_nothing_but_what_the_reader_ignores_is_refused(tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=2, targets=("kv_b_proj",)))
    with pytest.raises(AdapterError, match="vllm applies none of"):
        save_adapter(model, tmp_path / "out", reader=VLLM)
    assert not (tmp_path / "out").exists()


def test_a_file_without_what_was_trained_is_noticed(tmp_path):
    """Control arm: what is left out must be named, and an adapter that isn't zero has no place there."""
    model = reader_vectors.made("mla")
    save_adapter(model, tmp_path, reader=VLLM)
    with pytest.raises(AdapterError, match="kv_b_proj: the file has no"):
        verify_adapter(model, tmp_path)
