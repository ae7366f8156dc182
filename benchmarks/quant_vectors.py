"""Make tests/quant/vectors: weights packed and expanded by the libraries that write these formats.

They do not install beside this project's torch, or are deprecated, so their results are recorded, each with
the version that made it. A case is the tensors as they stand in a checkpoint, and "weight", what the library
expands them to. Made once, in an environment of its own:

    python -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.23.0 datasets "setuptools>=77" wheel
    oracle/bin/pip install --no-deps --no-build-isolation autoawq==0.2.9 gptqmodel==7.7.0 bitsandbytes==0.50.2
    oracle/bin/pip install --no-deps pypcre tokenicer logbar device-smi defuser torchao threadpoolctl dill
    oracle/bin/python benchmarks/quant_vectors.py awq gptq bitsandbytes --write tests/quant/vectors

and for the other two, in one more:

    oracle2/bin/pip install torch==2.13.0 transformers==5.23.0 pydantic
    oracle2/bin/pip install --no-deps nvidia-modelopt==0.47.0 omegaconf pulp scipy compressed-tensors==0.12.2
    oracle2/bin/python benchmarks/quant_vectors.py modelopt act_order --write tests/quant/vectors
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Cases = dict[str, dict[str, Tensor]]


def words(*shape: int, seed: int) -> Tensor:
    """int32 of any bits: every code and zero point, the sign bit among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def affine(weight_OI: Tensor, group: int, top: int) -> tuple[Tensor, Tensor]:
    """scales and zero points [out, in / group], codes 0..top from the smallest to the largest of a group."""
    grouped = weight_OI.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / top).half().float()
    return scales, (-low / scales).round().clamp(0, top)


def awq() -> Cases:
    """autoawq: WQLinear_GEMM packs, dequantize_gemm expands."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    cases: Cases = {}
    for name, group in (("group_32", 32), ("channel", 64)):
        torch.manual_seed(group)
        linear = torch.nn.Linear(64, 32, bias=False)
        scales, zeros = affine(linear.weight.data, group, 15)
        layer = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t())
        cases[name] = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    scales = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).half()
    cases["any_bits"] = {"qweight": words(64, 4, seed=1), "qzeros": words(2, 4, seed=2), "scales": scales}
    for parts in cases.values():
        group = 64 // parts["scales"].shape[0]
        parts["weight"] = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, group)
    return cases


def gptq() -> Cases:
    """gptqmodel: TorchLinear packs and expands; zero points of version 1 come from its converter."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    def layer(bits: int, group: int, act_order: bool, sym: bool) -> TorchLinear:
        module = TorchLinear(
            bits=bits,
            group_size=group,
            sym=sym,
            desc_act=act_order,
            in_features=64,
            out_features=24,
            format=FORMAT.GPTQ_V2,
        )
        return module.eval()

    cases: Cases = {}
    for bits, group, act_order, sym, old in (
        (4, 32, False, True, True),
        (4, 32, True, False, True),
        (4, 16, True, True, False),
        (4, -1, False, False, True),
        (8, 32, False, True, True),
        (8, 16, True, False, False),
        (2, 32, True, False, True),
    ):
        torch.manual_seed(bits * group + sym)
        linear, module = torch.nn.Linear(64, 24, bias=False), layer(bits, group, act_order, sym)
        width, top = (64 if group == -1 else group), 2**bits - 1
        g_idx = torch.arange(64) // width
        if act_order:
            g_idx = g_idx[torch.randperm(64)]
        # columns of one group stand together for `affine`, wherever g_idx puts them
        scales, zeros = affine(linear.weight.data[:, g_idx.argsort(stable=True)], width, top)
        if sym:
            zeros = torch.full_like(zeros, (top + 1) / 2)
        module.pack_original(linear, scales, zeros, g_idx.int())
        if old:
            config = QuantizeConfig(bits=bits, group_size=group)
            convert_gptq_v2_to_v1_format_module(module, config)
        labels = ("act_order " * act_order, "sym " * sym, "gptq" if old else "gptq_v2")
        name = f"bits_{bits} group_{group} {''.join(labels)}"
        parts = ("qweight", "qzeros", "scales", "g_idx")
        cases[name] = {part: getattr(module, part).clone() for part in parts}
        if old:
            convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
        cases[name]["weight"] = module.dequantize_weight()
        if bits < 8:
            # trained with, it takes another way to the same numbers
            assert torch.equal(cases[name]["weight"], module.train().dequantize_weight())

    # zero points of any bits: what version 1 adds to a whole word carries from one number to the next
    for bits in (4, 8):
        module = layer(bits, 32, True, False)
        module.qweight.copy_(words(*module.qweight.shape, seed=3))
        module.qzeros.copy_(words(*module.qzeros.shape, seed=4))
        module.scales.copy_(torch.randn(module.scales.shape, generator=torch.Generator().manual_seed(5)))
        module.g_idx.copy_(torch.arange(64) % 2)
        parts = {part: getattr(module, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
        cases[f"bits_{bits} group_32 any_bits gptq"] = parts | {"weight": module.dequantize_weight()}
    return cases


def bitsandbytes() -> Cases:
    """bitsandbytes: quantize_4bit and int8_vectorwise_quant pack, QuantState writes, on a CPU.

    Expanded by its implementation for any device, which its kernel for CPUs equals where a row has whole
    blocks. Where it has not, that kernel of 0.50.2 begins each row with a new block, unlike what packed them:
    the weights come back wrong by as much as they are.
    """
    import bitsandbytes.functional as F
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    cases: Cases = {}
    for kind, nested, dtype, (rows, columns), block in (
        ("nf4", True, torch.bfloat16, (136, 128), 64),
        ("nf4", True, torch.float16, (24, 32), 64),
        ("nf4", False, torch.bfloat16, (3, 48), 64),
        ("nf4", False, torch.float32, (16, 64), 128),
        ("fp4", True, torch.bfloat16, (24, 64), 64),
        ("fp4", False, torch.float16, (24, 64), 64),
    ):
        generator = torch.Generator().manual_seed(rows)
        weight = (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)
        codes, state = F.quantize_4bit(
            weight, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=torch.uint8
        )
        absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        expanded = _dequantize_4bit_compute(codes.flatten(), absmax, state.code, block, weight.shape, dtype)
        assert torch.equal(expanded, F.dequantize_4bit(codes, state)) is (columns % block == 0)
        written = {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        name = f"{kind} {'double ' * nested}{str(dtype).removeprefix('torch.')} block_{block}"
        cases[name] = {"weight": codes, **written, "expanded": expanded}

    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).half()
    codes, largest, _ = F.int8_vectorwise_quant(weight)
    expanded = F.int8_vectorwise_dequant(codes, largest)
    cases["int8"] = {
        "weight": codes,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
        "expanded": expanded,
    }
    return cases


def given(dtype: torch.dtype) -> Tensor:
    """[12, 64]: rows of several sizes, zeros, and multiples of a quarter, where rounding meets ties."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 64, generator=generator) * torch.rand(12, 1, generator=generator) * 4
    weight[1] = 0
    weight[2, 16:32] = 0
    weight[3] = (weight[3] * 4).round() / 4
    weight[4, 0] = 24
    return weight.to(dtype)


def modelopt() -> Cases:
    """nvidia-modelopt: "given" is what was quantized, "expanded" what is read back in float32."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    cases: Cases = {}
    codes = torch.arange(256, dtype=torch.uint8).expand(8, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)
    scales[(scales & 127) == 127] = 0  # NaN
    scales, whole = scales.view(8, 32).view(torch.float8_e4m3fn), torch.tensor(3.7 / 2688)
    packed = NVFP4QTensor(torch.Size((8, 512)), torch.float32, codes)
    cases["nvfp4 any_bits"] = {
        "weight": codes,
        "weight_scale": scales,
        "weight_scale_2": whole,
        "expanded": packed.dequantize(torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16}),
    }
    for dtype in (torch.float32, torch.bfloat16):
        name, weight = str(dtype).removeprefix("torch."), given(dtype)
        packed, scale, whole = NVFP4QTensor.quantize(weight.clone(), 16)
        cases[f"nvfp4 {name}"] = {
            "given": weight,
            "weight": packed._quantized_data,
            "weight_scale": scale,
            "weight_scale_2": whole,
            "expanded": packed.dequantize(
                torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16}
            ),
        }
        packed, scale = MXFP8QTensor.quantize(weight.clone())
        cases[f"mxfp8 {name}"] = {
            "given": weight,
            "weight": packed._quantized_data,
            "weight_scale": scale,
            "expanded": packed.dequantize(torch.float32, scale=scale),
        }
        # per row without the row of zeros: its scale is 0 there, and its codes NaN
        rows = torch.cat((weight[:1], weight[2:]))
        for kind, axis, source, shape in (("fp8", None, weight, ()), ("fp8_rows", 0, rows, (11,))):
            packed, scale = FP8QTensor.quantize(source, axis=axis)
            cases[f"{kind} {name}"] = {
                "given": source,
                "weight": packed._quantized_data,
                "weight_scale": scale.float().reshape(shape).clone(),
                "expanded": packed.dequantize(torch.float32, scale=scale.float()),
            }
    return cases


def act_order() -> Cases:
    """compressed-tensors before it left weight_g_idx out: columns in groups by their activations."""
    from compressed_tensors.compressors import PackedQuantizationCompressor, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    cases: Cases = {}
    compressor = PackedQuantizationCompressor(config=QuantizationConfig(config_groups={}))
    for bits, symmetric in ((4, True), (4, False), (8, False)):
        args = QuantizationArgs(
            num_bits=bits, strategy="group", group_size=16, symmetric=symmetric, actorder="group"
        )
        weight = given(torch.bfloat16)
        order = (torch.arange(64) // 16)[torch.randperm(64, generator=torch.Generator().manual_seed(bits))]
        grouped = weight[:, order.argsort(stable=True)].unflatten(1, (-1, 16))
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        parts = compressor.compress_weight(
            weight, scale, args, zero_point=None if symmetric else zero, g_idx=order.int()
        )
        parts |= {"weight_scale": scale, "weight_g_idx": order.int()}
        kept = {name: part for name, part in parts.items() if part is not None}
        # with packed zero points its own decompress_weight says that it is not there yet
        codes = unpack_from_int32(kept["weight_packed"], bits, weight.shape)
        expanded = dequantize(codes, scale, None if symmetric else zero, g_idx=order.int())
        cases[f"bits_{bits} {'symmetric' if symmetric else 'zeros'}"] = kept | {"expanded": expanded}
    return cases


LIBRARIES = {
    "awq": (awq, "autoawq"),
    "gptq": (gptq, "gptqmodel"),
    "bitsandbytes": (bitsandbytes, "bitsandbytes"),
    "modelopt": (modelopt, "nvidia-modelopt"),
    "act_order": (act_order, "compressed-tensors"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("formats", nargs="*", help=f"of {', '.join(LIBRARIES)}; all of them")
    parser.add_argument("--write", type=Path, required=True, help="folder of the files")
    arguments = parser.parse_args()
    for name in arguments.formats or LIBRARIES:
        make, library = LIBRARIES[name]
        tensors = {
            f"{case}/{part}": tensor.detach().contiguous().clone()
            for case, parts in make().items()
            for part, tensor in parts.items()
        }
        made_by = {"library": library, "version": version(library), "torch": torch.__version__}
        save_file(tensors, arguments.write / f"{name}.safetensors", metadata=made_by)


if __name__ == "__main__":
    main()
