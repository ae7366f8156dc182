"""Claims about recognising a format: each config.json is one codec or a refusal by name, no field is passed over
in silence, and a new format is one file and one line."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file
from transformers.utils.quantization_config import QuantizationMethod

from unfreeze.checkpoint import disk_tensors, open_checkpoint
from unfreeze.commands.inspect import inspect
from unfreeze.core.errors import ConfigError
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.quant import Int4, formats, fp8_scaled, integers, not_followed, recognise
from unfreeze.quant.codec import Format, Part, Table, Unreadable, parts_nbytes
from unfreeze.quant.compressed import KNOWN, KNOWN_OF_GROUP, ONLY
from unfreeze.quant.formats import FOREIGN, FORMATS, WRITERS, foreign_dtype, foreign_format
from unfreeze.quant.scheme import Modules, Rule, Scheme

SCHEME = QuantizationScheme(
    targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
)


def kimi_config(**changes: object) -> dict[str, object]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
    }
    weights.update({key: value for key, value in changes.items() if key in weights})
    group = {
        "targets": ["Linear"],
        "input_activations": changes.get("input_activations"),
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": changes.get("quant_method", "compressed-tensors"),
        "format": changes.get("format", "pack-quantized"),
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }


def test_kimis_quantization_config_is_read_at_the_top_or_under_text_config() -> None:
    scheme = recognise({"quantization_config": kimi_config()})
    assert scheme == Scheme((Rule(Int4(32)),), Modules(frozenset({"lm_head"}), patterns=(".*self_attn.*",)))
    nested = recognise({"text_config": {"quantization_config": kimi_config(group_size=128)}})
    assert nested.codecs == (Int4(128),) and nested.ignore == scheme.ignore
    assert recognise({"model_type": "llama"}) is None
    # same layout on disk
    assert recognise({"quantization_config": kimi_config(actorder="weight")}) is not None
    assert scheme.codec_for("model.layers.0.self_attn.q_proj") is scheme.codec_for("lm_head") is None
    assert scheme.codec_for("model.layers.1.mlp.experts.0.up_proj") == Int4(32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"symmetric": "yes"}, "symmetric = 'yes'"),
        ({"actorder": "columns"}, "actorder"),
        ({"num_bits": 3}, "num_bits 3"),
        ({"type": "float"}, "float weights"),
        ({"strategy": "token"}, 'strategy "token"'),
        ({"strategy": "tensor", "symmetric": False}, "one zero point for a matrix"),
        ({"strategy": "channel", "actorder": "group"}, "actorder"),
        ({"dynamic": True}, "dynamic"),
        ({"group_size": -1}, "group_size -1"),
        ({"format": "int-quantized"}, "int weights with num_bits 4"),
        ({"format": "nvfp4-pack-quantized"}, "int weights with num_bits 4"),
        ({"format": "mxfp6-pack-quantized"}, 'format "mxfp6-pack-quantized"'),
        ({"format": "mixed-precision"}, 'format "mixed-precision"'),
        ({"quant_method": "aqlm"}, 'quant_method "aqlm"'),
        ({"quant_method": "fbgemm_fp8"}, 'quant_method "fbgemm_fp8"'),
        ({"quant_method": None, "quant_algo": "W4A8"}, 'quant_method "modelopt", quant_algo "W4A8"'),
        (
            {"transform_config": {"config_groups": {"v": {"type": "hadamard", "apply": []}}}},
            "transform_config",
        ),
        ({"sparsity_config": {"format": "sparse-24-bitmask", "ignore": []}}, "sparsity_config"),
        ({"moe_sparsity_config": {"method": "reap"}}, "moe_sparsity_config"),
        ({"quantization_status": "calibration"}, "quantization_status 'calibration' (not final)"),
        ({"block_structure": [128, 128]}, "weights.block_structure [128, 128]"),
        ({"zero_point": True}, "weights.zero_point True"),
    ],
)
def test_other_quantizations_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recognise({"quantization_config": changed(**change)})
    assert named in caught.value.message
    assert caught.value.next


OF_WEIGHTS = ("block_structure", "zero_point", "observer_kwargs", "scale_dtype", "rounding")


def changed(**change: object) -> dict[str, object]:
    """Kimi's table with fields changed where they stand: in the table, or in its group's weights."""
    config = kimi_config(**change)
    config |= {
        name: value
        for name, value in change.items()
        if name not in kimi_config() and name not in OF_WEIGHTS and name != "actorder"
    }
    weights = config["config_groups"]["group_0"]["weights"]
    weights |= {name: value for name, value in change.items() if name in OF_WEIGHTS}
    return config


def test_fields_without_effect_are_taken_and_unknown_ones_named() -> None:
    quiet = changed(
        transform_config={},
        sparsity_config={"format": "dense", "ignore": []},
        kv_cache_scheme=None,
        quantization_status="compressed",
        version="0.9",
        global_compression_ratio=None,
        block_structure=None,
        observer_kwargs={},
        scale_dtype=None,
    )
    assert recognise({"quantization_config": quiet}) is not None
    assert not_followed({"quantization_config": quiet}) == "" == not_followed({"model_type": "llama"})
    loud = changed(kv_cache_scheme={"num_bits": 8}, smooth=0.5, rounding="up")
    assert recognise({"quantization_config": loud}) is not None
    assert (
        not_followed({"text_config": {"quantization_config": loud}})
        == "quantization_config: smooth = 0.5, config_groups.group_0.weights.rounding = 'up': unknown and"
        " ignored; kv_cache_scheme is for a server's cache: training and generation here keep the"
        " cache unquantized"
    )


def test_every_field_that_compressed_tensors_writes_is_known() -> None:
    written = QuantizationConfig(
        config_groups={"group_0": SCHEME}, format="pack-quantized", quantization_status="compressed"
    ).model_dump()
    assert recognise({"quantization_config": written}) is not None
    assert not_followed({"quantization_config": written}) == ""
    known = KNOWN | ONLY.keys() | {"kv_cache_scheme"}
    assert (
        set(QuantizationConfig.model_fields) <= known
        and set(QuantizationScheme.model_fields) <= KNOWN_OF_GROUP
    )
    assert set(QuantizationArgs.model_fields) <= integers.KNOWN


@pytest.mark.parametrize(
    "table", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}]
)
def test_a_table_without_a_method_is_refused_with_the_fields_it_has(table):
    """MLX writes none."""
    said = rf"names no quant_method; it has {', '.join(table)} \(as MLX writes it\)"
    with pytest.raises(ConfigError, match=said):
        recognise({"quantization_config": table})
    with pytest.raises(ConfigError, match="names no quant_method; it has quantization"):
        recognise({"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}})
    assert recognise({"quantization_config": {}}) is None


@pytest.mark.parametrize("piece", FOREIGN)
def test_a_tensors_name_tells_a_format_that_is_not_read(piece: str) -> None:
    assert foreign_format(f"model.layers.0.mlp.up_proj.{piece}") == FOREIGN[piece]


def test_a_dtype_that_is_read_is_no_foreign_formats() -> None:
    """That those of foreign formats are named, test_resolve.py shows with files."""
    assert foreign_dtype("BF16") == foreign_dtype("F32") == ""


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.key)
def test_a_format_that_is_read_has_left_the_list_of_foreign_ones(format: Format) -> None:
    foreign = sorted(set(format.suffixes) & FOREIGN.keys())
    assert not foreign, f"{format.key} is read: take {foreign} out of FOREIGN in quant/formats.py"


ROOT = Path(__file__).resolve().parents[2]


def forgotten(files: Collection[str], formats: Collection[Format], tests: Collection[str]) -> list[str]:
    """What is missing for the format files of quant/, each with how to mend it."""
    found = {name: getattr(importlib.import_module(f"unfreeze.quant.{name}"), "FORMAT", ()) for name in files}
    made = {name: (format,) if isinstance(format, Format) else format for name, format in found.items()}
    bad = [
        f"quant/{name}.py has a FORMAT that quant/formats.py does not know: import it there and add"
        f" {name}.FORMAT to FORMATS"
        for name, of_file in made.items()
        if any(format not in formats for format in of_file)
    ]
    return bad + [
        f"quant/{name}.py has no tests/quant/test_{name}.py: equal, bit for bit and both ways, to the library that"
        " writes the format"
        for name, of_file in made.items()
        if of_file and f"test_{name}.py" not in tests
    ]


FILES = [path.stem for path in (ROOT / "src/unfreeze/quant").glob("*.py") if path.stem != "__init__"]
HERE = [path.name for path in Path(__file__).parent.glob("test_*.py")]


def test_every_format_file_has_its_line_and_its_test() -> None:
    bad = forgotten(FILES, FORMATS.values(), HERE)
    assert not bad, "\n".join(bad)


def test_control_arm_a_forgotten_line_and_a_forgotten_test_are_seen() -> None:
    assert "add integers.FORMAT to FORMATS" in forgotten(["integers"], [], HERE)[0]
    assert "no tests/quant/test_integers.py" in forgotten(["integers"], FORMATS.values(), [])[0]


REFUSED_TOO = {"other bit widths", "pickle files"}
"""What docs/reference/formats.md lists as refused beside the formats of FOREIGN."""


def wrong_in_the_manual(page: str, readable: Collection[Format], others: Collection[str]) -> list[str]:
    """What is wrong in the two rows of docs/reference/formats.md that list the formats, each with how to mend it."""
    read, refused = (
        re.search(rf"^\| {row} \| (.*) \|$", page, re.M) for row in ("formats", "refused by name")
    )
    assert read and refused, "docs/reference/formats.md has no rows 'formats' and 'refused by name'"
    names = {word.strip() for word in re.split("[,;]", refused[1])}
    titles = [title.partition(" (")[0].partition(" with ")[0] for title in others]
    foreign = {name for title in titles for name in title.split(" or ")}
    bad = [
        f"row 'formats' of docs/reference/formats.md does not name {format.key.split()[-1]}"
        for format in readable
        if format.key.split()[-1].lower() not in read[1].lower()
    ]
    extra, missing = sorted(names - foreign - REFUSED_TOO), sorted(foreign - names)
    bad += (
        [f"row 'refused by name' of docs/reference/formats.md: remove {extra}, or add it to FOREIGN"]
        if extra
        else []
    )
    return bad + ([f"row 'refused by name' of docs/reference/formats.md: add {missing}"] if missing else [])


def test_the_manual_lists_what_is_read_and_what_is_refused() -> None:
    page = (ROOT / "docs/reference/formats.md").read_text(encoding="utf-8")
    bad = wrong_in_the_manual(page, FORMATS.values(), FOREIGN.values())
    assert not bad, "\n".join(bad)


def test_control_arm_a_format_that_the_manual_forgets_is_seen() -> None:
    page = "| formats | INT4 (pack-quantized), FP8 |\n| refused by name | NVFP4; pickle files |"
    assert wrong_in_the_manual(page, [integers.FORMAT[0], fp8_scaled.FORMAT[0]], ["NVFP4 (x)"]) == []
    assert wrong_in_the_manual(page, [ROW_SCALED], ["NVFP4 (x)", "MXFP4 with blocks"]) == [
        "row 'formats' of docs/reference/formats.md does not name row-scaled",
        "row 'refused by name' of docs/reference/formats.md: add ['MXFP4']",
    ]
    assert "remove ['NVFP4']" in wrong_in_the_manual(page, [], [])[0]


@dataclass(frozen=True)
class RowScaled:
    """A format as the next ones will be: FP8 codes under the name of a dense weight, and a scale per row.
    w[o, i] = code[o, i] * scale[o]."""

    name: str = "row-scaled"
    suffixes: tuple[str, ...] = ("weight", "row_scale")
    variants: str = "another scale"

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        return {"weight": ("F8_E4M3", (out_features, in_features)), "row_scale": ("F32", (out_features,))}

    def as_stored(self, dtypes: Mapping[str, str]) -> RowScaled:
        return self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        return parts["weight"]

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts["weight"].float() * parts["row_scale"].unsqueeze(-1)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(-1) / 448
        return {"weight": (weight / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), "row_scale": scale}

    def nbytes(self, out_features: int, in_features: int) -> int:
        return parts_nbytes(self.parts(out_features, in_features).values())


def read_row_scaled(where: str, table: Table) -> RowScaled:
    if table.get("bits") != 8:
        raise Unreadable(f"{where}: bits {table.get('bits')}")
    return RowScaled()


ROW_SCALED = Format("row-scaled", "row-scaled FP8", read_row_scaled, frozenset({"bits"}), ("row_scale",))
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def test_a_format_is_added_by_one_line(tmp_path, monkeypatch):
    """Loaded, counted, computed with (linear layers and stacked experts), saved again: nothing else knows of
    it. The oracle is the same model, dense, with the expanded weights."""
    monkeypatch.setitem(formats.FORMATS, ROW_SCALED.key, ROW_SCALED)
    from unfreeze import models
    from unfreeze.models.publish import published

    codec, quantization = RowScaled(), {"quant_method": "row-scaled", "bits": 8}
    dense = models.build(models.shape(QWEN3), dtype=torch.float32, device="cpu")
    models.initialize(dense, seed=0)
    packed, expanded = {}, {}
    for name, tensor in published(dense, {**QWEN3, "dtype": "float32"}):
        packed[name] = expanded[name] = tensor.contiguous()
        if name.endswith("_proj.weight"):
            parts = codec.quantize(tensor)
            packed |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            expanded[name] = codec.dequantize(parts)
    for folder, tensors, config in (
        ("packed", packed, {"quantization_config": quantization}),
        ("dense", expanded, {}),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps({**QWEN3, "dtype": "float32", **config}))

    facts = inspect(str(tmp_path / "packed"))
    assert facts["format"] == "row-scaled" and facts["groups"]["norms"]["formats"] == ["F32"]
    assert facts["parameters"] == inspect(str(tmp_path / "dense"))["parameters"]
    ours, oracle = (open_model(open_checkpoint(tmp_path / folder)) for folder in ("packed", "dense"))
    held = {name: buffer for name, buffer in ours.named_buffers() if name.endswith("row_scale")}
    assert len(held) == 2 * (4 + 2) and all(buffer.dtype == torch.float32 for buffer in held.values())
    batch = pack([Example(list(range(20)), [1.0] * 20)])
    assert torch.equal(ours.hidden(batch), oracle.hidden(batch))
    saved = dict(disk_tensors(ours.state_dict().items(), models.rules(ours.shape), lambda name: codec))
    assert saved.keys() == packed.keys()
    assert all(torch.equal(tensor, packed[name]) for name, tensor in saved.items())


def test_without_its_line_the_format_is_refused_and_its_variants_are_with_it(monkeypatch):
    config = {"quantization_config": {"quant_method": "row-scaled", "bits": 4, "smooth": 1}}
    with pytest.raises(ConfigError, match='quant_method "row-scaled"'):
        recognise(config)
    monkeypatch.setitem(formats.FORMATS, ROW_SCALED.key, ROW_SCALED)
    with pytest.raises(ConfigError, match=r"bits 4.*Readable: compressed-tensors.*; row-scaled FP8"):
        recognise(config)
    config["quantization_config"]["bits"] = 8
    assert recognise(config).codec_for("model.layers.0.mlp.up_proj") == RowScaled()
    assert "smooth = 1" in not_followed(config)


def missing_in_the_table(page: str, keys: Collection[str]) -> list[str]:
    """The formats that docs/reference/formats.md has no row of, and the tests it names that are not there."""
    rows = re.findall(r"^\| (.*) \|$", page[max(0, page.find("| format, as config.json")) :], re.M)
    last = (row.rpartition("| ")[2] for row in rows[2:] if "tests/" not in row)
    named = {name for cell in last for name in cell.split(", ")} - {"---", "test"}
    lost = [f"no tests/quant/test_{name}.py" for name in sorted(named) if f"test_{name}.py" not in HERE]
    return lost + [
        key for key in keys if not any(set(key.split()) <= set(re.findall(r"[\w-]+", row)) for row in rows)
    ]


def test_the_table_of_formats_has_a_row_of_each() -> None:
    page = (ROOT / "docs/reference/formats.md").read_text(encoding="utf-8")
    assert missing_in_the_table(page, FORMATS) == []


def test_control_arm_a_format_without_a_row_and_a_test_that_is_not_there_are_seen() -> None:
    page = "| format | test |\n|---|---|\n| awq | awq |\n| x | nothing |\n"
    assert missing_in_the_table(page, ["awq", "gptq"]) == ["no tests/quant/test_nothing.py", "gptq"]


@pytest.mark.parametrize("method", [method.value for method in QuantizationMethod])
def test_a_method_that_transformers_knows_is_read_or_refused_with_the_library_that_writes_it(method):
    with pytest.raises(ConfigError) as error:  # a table of nothing but a name that no method gives its sizes
        recognise({"quantization_config": {"quant_method": method, "bits": 5, "config_groups": {"a": 1}}})
    assert WRITERS[method] in error.value.next


def test_control_arm_a_library_that_nobody_knows_is_not_named():
    with pytest.raises(ConfigError, match='quant_method "smoothie"') as error:
        recognise({"quantization_config": {"quant_method": "smoothie"}})
    assert "the library that wrote this one can usually" in error.value.next
