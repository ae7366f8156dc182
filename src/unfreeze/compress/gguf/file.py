"""Write a GGUF tensor by tensor: sizes are known from the shapes, so no more than one matrix is in memory.

The file has a temporary name until it is whole and on the disk.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from unfreeze.compress.gguf.families import Value
from unfreeze.compress.gguf.tensors import Planned
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.files import sync_folder
from unfreeze.core.units import format_bytes

if TYPE_CHECKING:
    from gguf import GGUFWriter

ALIGNMENT = 32  # bytes, of the head and of each tensor's data: GGUF's default
Progress = Callable[[int, int], None]
"""(bytes done, total bytes)"""


def need_gguf() -> None:
    """Raise ConfigError if the library is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a GGUF is written with the library gguf, which is not installed", next="pip install gguf"
        ) from None


def nbytes(tensor: Planned) -> int:
    """Bytes of a tensor's data in the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return prod(tensor.shape) // block * size


def head_of(
    arch: str,
    settings: Mapping[str, Value],
    tensors: Sequence[Planned],
    more: Iterable[Callable[[GGUFWriter], None]] = (),
) -> bytes:
    """All of the file before the first tensor's data, as gguf's writer makes it; see `write_gguf`."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.gguf_writer import WriterState

    writer, stream = GGUFWriter(None, arch), io.BytesIO()
    for key, value in settings.items():
        _add(writer, key, value)
    for add in more:
        add(writer)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes(tensor), kind)
    writer.fout, writer.state = cast(Any, [stream]), WriterState.EMPTY  # as after it has opened a file
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(stream, stream.tell())
    return stream.getvalue()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_disk(path: Path, needed: int) -> None:
    """Raise DoesNotFit if the disk has less room than the file's bytes."""
    folder = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DoesNotFit(
            f"disk: {path.name} takes {format_bytes(needed)}; {format_bytes(free)} free in {folder}",
            next="free space, or give --out on another disk, or --type q8_0",
        )


def write_gguf(
    path: Path,
    arch: str,
    settings: Mapping[str, Value],
    tensors: Sequence[Planned],
    more: Iterable[Callable[[GGUFWriter], None]] = (),
    progress: Progress | None = None,
) -> None:
    """Write the file, or nothing.

    settings: whole keys -> values; int as uint32, float as float32. more: called with gguf's writer, for
    settings of other types (the vocabulary). Raises DoesNotFit if the disk has less room, before a byte is
    written.
    """
    from gguf import GGMLQuantizationType, quants

    head = head_of(arch, settings, tensors, more)
    check_disk(path, len(head) + sum(_padded(nbytes(tensor)) for tensor in tensors))
    temporary = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    total, done = sum(map(nbytes, tensors)), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(head)
            for tensor in tensors:
                before, size = file.tell(), nbytes(tensor)
                for part in tensor.parts():
                    data = quants.quantize(part.contiguous().numpy(), GGMLQuantizationType[tensor.kind])
                    file.write(np.ascontiguousarray(data).data)
                    done += data.nbytes
                    if progress is not None:
                        progress(done, total)
                assert file.tell() - before == size, tensor.name
                file.write(bytes(_padded(size) - size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
