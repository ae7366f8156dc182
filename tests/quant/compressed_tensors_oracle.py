"""What compressed-tensors itself writes of a weight, and reads back."""

from __future__ import annotations

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.helpers import generate_gparam
from torch import Tensor


def bits_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """What must be equal for two tensors to be the same bit for bit."""
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def weight_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of several sizes, one of zeros, and a group of zeros; multiples of a quarter, where rounding has ties."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) * 3
    weight[3] = 0
    weight[5, :32] = 0
    weight[7] = (weight[7] * 4).round() / 4
    return weight.to(dtype)


def theirs(format: str, weight: Tensor, **arguments: object) -> tuple[dict[str, Tensor], Tensor]:
    """(suffix -> tensor as it is written, what they read of it); scales from the least and largest weights."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    whole: dict[str, Tensor] = {}
    if args.strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(1, (-1, args.group_size))
        least, most = grouped.amin(-1), grouped.amax(-1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        least, most = weight.min(), weight.max()
    if args.strategy == "tensor_group":
        whole["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(least, most, args, global_scale=whole.get("weight_global_scale"))
    given = {"weight": weight, "weight_scale": scale, **whole}
    if not args.symmetric:
        given["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(format)
    written = compressor.compress(given, scheme)
    return written, compressor.decompress(dict(written), scheme)["weight"]


def differences(codec, format: str, weight: Tensor, **arguments: object) -> list[str]:
    """Where `codec` and the library are not the same bit for bit, writing and reading."""
    written, read = theirs(format, weight, **arguments)
    ours = codec.quantize(weight)
    extras = codec.disk_extras(*weight.shape)
    bad = [name for name, part in ours.items() if bits_of(part) != bits_of(written[name])]
    bad += [name for name, values in extras.items() if list(values) != written[name].tolist()]
    bad += sorted(written.keys() ^ (ours.keys() | extras.keys()))
    parts = codec.parts(*weight.shape)
    bad += [f"shape of {name}" for name, part in ours.items() if tuple(part.shape) != parts[name][1]]
    found = codec.dequantize({name: written[name] for name in ours})
    return bad + ([] if bits_of(found) == bits_of(read) else ["read"])
