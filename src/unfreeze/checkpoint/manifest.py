"""Manifest: the contents of a checkpoint, without reading a tensor.

The name, dtype, shape, bytes and place of each tensor, from config.json, the index and the header of each
safetensors file. It is strict: every byte of a file belongs to exactly one tensor. No code from a checkpoint
is run, pickles (.bin, .pt) are refused, and no name may lead outside the folder.

Source: https://github.com/huggingface/safetensors. A file is 8 bytes of header length (little-endian), a JSON
header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unfreeze.checkpoint.faults import Faults, refuse_twice
from unfreeze.checkpoint.folder import PICKLES, conversion, folder_of
from unfreeze.checkpoint.nested import in_model, prefix_of
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError
from unfreeze.core.events import RESOLVED
from unfreeze.core.longer import Longer
from unfreeze.quant.codec import Codec, as_table, texted
from unfreeze.quant.formats import is_part, recognise
from unfreeze.quant.scheme import Scheme, is_unread
from unfreeze.quant.spelling import canonical
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.checkpoint.packing import OnLoad, PackedFrom

MAX_DIMS = 64  # dimensions of a tensor; PyTorch's own limit
MAX_SIZE = 2**62  # elements or bytes: no file has more, and int64 counters would overflow
MAX_TEXT = 4096  # bytes of a format's text about one weight; bitsandbytes' have 170
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
MERGE = "merge.json"  # progress of unfreeze merge in a folder; config.json comes last
UPCYCLE = "upcycle.json"  # of unfreeze upcycle
SWAP = "swap.json"  # of unfreeze swap
QUANTIZE = "quantize.json"  # of unfreeze quantize
STOPPED = (
    (MERGE, "a merge"),
    (UPCYCLE, "an upcycle"),
    (SWAP, "a swap"),
    (QUANTIZE, "a quantization by unfreeze quantize"),
)
MODELOPT = "hf_quant_config.json"
BESIDE = (MODELOPT, "quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files beside config.json with the quantization of older releases: NVIDIA's, AutoGPTQ's, autoawq's,
AutoRound's."""
AWQ_WORDS = {"w_bit", "q_group_size", "zero_point"}  # autoawq's names for GPTQ's bits, group_size


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor on disk. `offset` is absolute in `file`; `dtype` is the format's name ("BF16", "I32", …).

    packed_from  of a tensor that is not on disk, but made when it is read (packing.py): `file` and `offset`
                 are then those of the matrix that it is made from
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int
    packed_from: PackedFrom | None = None


@dataclass(frozen=True)
class Manifest:
    """A checkpoint folder.

    tensors  by name on disk.
    prefix   prefix of the text model's names in a release that holds more (nested.py), or "".
    longer   the scaling that `config` has for more positions than the files say (models/longer.py), if any
    on_load  of a float release that is packed while it is loaded: `config` and `tensors` are then those of
             the packed one, and this has the release as it is on disk
    tokenizer  folder of the tokenizer's files, if not `path`: with tokens that an adapter added
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    prefix: str
    files: tuple[Path, ...]
    generation_config: dict[str, Any] = field(default_factory=dict)
    longer: Longer | None = None
    on_load: OnLoad | None = None
    tokenizer: Path | None = None

    @property
    def tokens(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.tokenizer or self.path

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def by_model_name(self) -> dict[str, TensorInfo]:
        """The tensors by the model's names, parts of packed weights spelled as in quant/spelling.py."""
        return {canonical(in_model(self.prefix, name)): info for name, info in self.tensors.items()}

    def is_packed(self) -> bool:
        """True if a weight is stored in a readable quantized format, whatever config.json says."""
        return any(map(is_part, self.by_model_name()))

    def scheme(self) -> Scheme | None:
        """The format of each module, from config.json; None for a checkpoint that isn't quantized.

        Scales have the dtype of the files. Names are those of `by_model_name`. Raises ConfigError for a
        format that cannot be read, CheckpointError if scales have several dtypes.
        """
        recognised = recognise(self.config)
        if recognised is None:
            return None
        disk = self.by_model_name()
        scheme = recognised.as_stored({name: info.dtype for name, info in disk.items()})
        texts = {codec: codec.text for codec in scheme.codecs if texted(codec)}
        for codec, text in texts.items():
            first = next((info for name, info in disk.items() if name.endswith(f".{text}")), None)
            if first is not None and first.packed_from is None:
                scheme = scheme.replaced({codec: codec.with_text(_text(first), first.name)})
        return scheme


def _text(info: TensorInfo) -> bytes:
    """The bytes of a text beside a packed weight."""
    if info.nbytes > MAX_TEXT:
        raise CheckpointError(
            f"{info.name} has {info.nbytes:,} bytes; a text about one weight has at most {MAX_TEXT:,}"
        )
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)


def count_weights(tensors: Mapping[str, TensorInfo], scheme: Scheme | None) -> int:
    """The number of weights in these tensors: a packed weight counts by its codes.

    A codec derives that number from the shapes of the parts. Scales of activations do not count. Raises
    CheckpointError for a packed weight that lacks one of its parts.
    """
    packed: dict[str, tuple[Codec, dict[str, tuple[int, ...]]]] = {}
    count = 0
    for name, info in tensors.items():
        codec = scheme.part_of(name, tensors) if scheme is not None else None
        if codec is not None:
            base, _, suffix = name.rpartition(".")
            packed.setdefault(base, (codec, {}))[1][suffix] = info.shape
        elif scheme is None or not is_unread(name):
            count += prod(info.shape)
    for base, (codec, parts) in packed.items():
        try:
            count += prod(codec.shape(parts))
        except KeyError as missing:
            raise CheckpointError(
                f"{base} has {', '.join(parts)} and no {missing.args[0]}, without which {codec.name} cannot"
                " be read",
                next="get the checkpoint from its publisher again",
            ) from None
    return count


def open_checkpoint(source: str | Path, *, progress: Callable[[str], None] | None = None) -> Manifest:
    """The manifest of a folder, or of a Hugging Face id "org/name", which is downloaded first.

    progress: called with one line about what is fetched. Raises CheckpointError: nothing there, not a
    checkpoint, or damaged (missing shard, truncated file, an index that disagrees).
    """
    folder = folder_of(source, progress)
    config_file = folder / "config.json"
    if not config_file.is_file():
        if (folder / RESOLVED).is_file():
            # no flag here: of some commands the model is the first word, and few take an adapter
            whole, merge = folder / "model", f"unfreeze merge {folder}"
            raise CheckpointError(
                f"{folder} is a training run, not a checkpoint",
                next=f"give its model: {whole}"
                if whole.is_dir()
                else f"{merge}, which writes a checkpoint; sft and others continue a run with --adapter",
            )
        for file, noun in STOPPED:
            if (folder / file).is_file():
                raise CheckpointError(
                    f"{folder} is {noun} that was stopped: it has {file} and no config.json yet",
                    next=f"give the same {noun.split()[-1]} command again; it continues where it stopped",
                )
        raise CheckpointError(
            f"{folder} has no config.json", next="give the folder that holds config.json and *.safetensors"
        )
    config = read_config(folder)

    # headers and index; all their faults are one error
    generation = folder / "generation_config.json"
    faults = Faults(folder)
    tensors, files = _tensors(folder, faults)
    faults.raise_if_any(
        next=(
            f"download the damaged files again into {folder} (huggingface_hub resumes), then: unfreeze"
            f" inspect {folder}"
        )
    )
    return Manifest(
        path=folder,
        config=config,
        tensors=tensors,
        prefix=prefix_of(tensors),
        files=tuple(files),
        generation_config=read_json(generation) if generation.is_file() else {},
    )


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, or the file itself, with the quantization that older releases put beside it.

    That is the first existing file of BESIDE, or NAME.<it> beside NAME.json.
    """
    file = path if path.is_file() else path / "config.json"
    config = read_json(file)
    text = as_table(config.get("text_config")) or {}
    if config.get("quantization_config") or text.get("quantization_config"):
        return config
    for name in BESIDE:
        beside = file.with_name(name if file.name == "config.json" else f"{file.stem}.{name}")
        if beside.is_file():
            return {**config, "quantization_config": _beside(name, read_json(beside))}
    return config


def _beside(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of BESIDE as a quantization_config. Those of 2023 name no quant_method."""
    if name == MODELOPT:
        inner = table.get("quantization")
        return {"quant_method": "modelopt", "source": name, **(inner if isinstance(inner, dict) else {})}
    if "quant_method" in table:
        return dict(table)
    return {"quant_method": "awq" if AWQ_WORDS & table.keys() else "gptq", **table}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises CheckpointError with line and column if it is not one, and for a link that leads elsewhere.
    """
    return read_object(inside(path), CheckpointError)


def inside(path: Path) -> Path:
    """`path` itself, after checking its target if it is a link.

    A checkpoint packed by someone else must not make us read other files of this machine. Allowed: a target
    in the same folder, and the links of the Hub's cache (snapshots/<revision>/x -> blobs/<hash> of the same
    repository). A link to the folder itself is not allowed. Raises CheckpointError.
    """
    if not path.is_symlink():
        return path
    folder, target = path.parent.resolve(), path.resolve()
    cache = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not (target.is_relative_to(folder) or target.is_relative_to(cache)):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder, to {target}; it is not followed",
            next=(
                f"if you made it: give the folder {target.parent} itself, or put the file (or a hard link to"
                " it) in place of the link"
            ),
        )
    return path


def _tensors(folder: Path, faults: Faults) -> tuple[dict[str, TensorInfo], list[Path]]:
    """Every tensor of the folder's weight files, checked against the index if there is one."""
    index = folder / INDEX
    weight_map = _weight_map(index) if index.is_file() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else [_single_file(folder)]
    refuse_twice(folder, names, SINGLE, INDEX)
    present = [name for name in names if (folder / name).is_file()]
    for name in sorted(set(names) - set(present)):
        faults.add(
            "files named by the index are not there",
            f"{name} is missing ({len(present)} of {len(names)} shards present)",
            cause="an unfinished download",
        )
    tensors: dict[str, TensorInfo] = {}
    for name in present:
        for info in read_header(inside(folder / name), faults):
            if info.name in tensors:
                faults.add(
                    "tensors are in two files", f"{info.name} in {tensors[info.name].file.name} and {name}"
                )
            tensors[info.name] = info
    if weight_map is not None:
        _compare_with_index(weight_map, tensors, set(present), faults)
    return tensors, [folder / name for name in present]


def _compare_with_index(
    weight_map: dict[str, str], tensors: dict[str, TensorInfo], present: set[str], faults: Faults
) -> None:
    """Each tensor must be in the file that the index names, and the index must name each tensor.

    If a file is damaged, only that is reported: the tensors it should hold would all be missing too.
    """
    damaged, other = bool(faults), f"{INDEX} is of another release"
    for name, file in weight_map.items():
        if file in present and not damaged and (name not in tensors or tensors[name].file.name != file):
            place = f"it is in {tensors[name].file.name}" if name in tensors else "it is in no file"
            faults.add(
                "tensors are not where the index says", f"{name}: the index says {file}, {place}", cause=other
            )
    for name in tensors.keys() - weight_map.keys():
        faults.add("tensors are not in the index", f"{name} in {tensors[name].file.name}", cause=other)


def _weight_map(index: Path) -> dict[str, str]:
    """tensor name -> file name.

    A file name is a plain name, without folder or "..": an index cannot lead out of its folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", next="download or write the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9_.\-+=]*\.safetensors", file
        ):
            raise CheckpointError(
                f"{index}: weight_map puts {name!r} in {file!r}, which is not the plain name of a"
                " .safetensors file in this folder",
                next="do not use this checkpoint; get it from its publisher",
            )
    return weight_map


def _single_file(folder: Path) -> str:
    """The one weights file of a folder without an index."""
    files = sorted(
        entry.name for entry in folder.iterdir() if entry.suffix == ".safetensors" and entry.is_file()
    )
    if SINGLE in files:
        return SINGLE
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder} has {len(files)} .safetensors files but no {INDEX}; first: {files[0]}",
            next=f"download {INDEX} from the publisher",
        )
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds pickled weights only ({pickles[0]}); unpickling can run any code, so they are"
            " not read",
            next=conversion(folder, pickles[0], "model.safetensors"),
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors file",
        next="give the folder that holds config.json and *.safetensors",
    )


def read_header(file: Path, faults: Faults) -> list[TensorInfo]:
    """The tensors of one safetensors file, in file order.

    Faults are added to `faults`; then the list is empty or partial.
    """
    # 8 bytes of length, then the header
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            faults.add(
                "files are placeholders",
                f"{file.name} is a Git LFS pointer of {size} bytes",
                cause="cloned without git lfs pull",
            )
            return []
        if len(start) < 8 or length > min(size - 8, MAX_HEADER):
            detail = f"{file.name} has {size:,} bytes; its header needs {length + 8:,}"
            faults.add("files are truncated or not safetensors", detail, cause="an unfinished download")
            return []
        raw = stream.read(length)

    # the header: one JSON object, name -> entry, and perhaps __metadata__
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and deep nesting
        faults.add(
            "files have a damaged header",
            f"{file.name}: {error}",
            cause="an unfinished download, or not a safetensors file",
        )
        return []
    if not isinstance(header, dict):
        faults.add("files have a damaged header", f"{file.name}: the header is not an object")
        return []
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        faults.add("files have a damaged header", f"{file.name}: __metadata__ is not a table of texts")

    # check each entry, then all of them together
    infos = [info for name, entry in header.items() if (info := _info(file, name, entry, 8 + length, faults))]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    if len(infos) == len(header):
        _check_layout(file, infos, 8 + length, size, faults)
    return infos


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    for key, value in pairs:
        text = key + value if isinstance(value, str) else key
        text.encode()  # half a surrogate pair is not text: UnicodeEncodeError, a ValueError
    return keys


def _info(file: Path, name: str, entry: object, data_start: int, faults: Faults) -> TensorInfo | None:
    """One entry of a header, checked on its own."""
    where = f"{name} in {file.name}"
    fields = as_table(entry) or {}
    dtype = fields.get("dtype")
    shape, span = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    sized = shape is not None and prod(extent or 1 for extent in shape) < MAX_SIZE
    spans = span is not None and len(span) == 2 and span[0] <= span[1]
    if not isinstance(dtype, str) or shape is None or span is None or not (sized and spans):
        faults.add("header entries are malformed", f"{where}: {str(entry)[:120]}")
        return None
    if dtype not in ITEMSIZE:
        faults.add("tensors have an unknown dtype", f"{where}: {dtype!r}; known: {', '.join(ITEMSIZE)}")
        return None
    nbytes = ITEMSIZE[dtype] * prod(shape)
    if span[1] - span[0] != nbytes:
        detail = f"{where}: {dtype} {shape} is {nbytes:,} bytes, data_offsets span {span[1] - span[0]:,}"
        faults.add("tensors do not fill their bytes", detail, cause="a damaged or hand-made header")
        return None
    return TensorInfo(name, dtype, tuple(shape), nbytes, file, data_start + span[0])


def _naturals(value: object) -> list[int] | None:
    """`value` if it is a list of at most MAX_DIMS whole numbers from 0 to MAX_SIZE; JSON true is not one."""
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return None
    items = cast("list[object]", value)
    whole = [item for item in items if type(item) is int and 0 <= item < MAX_SIZE]
    return whole if len(whole) == len(items) else None


def _check_layout(file: Path, infos: list[TensorInfo], start: int, size: int, faults: Faults) -> None:
    """Tensors must be contiguous, without gap or overlap, from the header to the end of the file."""
    end = start
    for info in infos:
        if info.offset != end:
            kind = "tensors overlap another" if info.offset < end else "tensors leave a gap before them"
            faults.add(
                kind,
                f"{info.name} in {file.name} begins at byte {info.offset:,}, expected {end:,}",
                cause="a damaged header",
            )
            return
        end += info.nbytes
    if end > size:
        cut = f"{sum(info.offset + info.nbytes > size for info in infos)} of its {len(infos)} tensors"
        detail = f"{file.name} has {size:,} bytes, its header describes {end:,} (cut off: {cut})"
        faults.add("files are truncated", detail, cause="an unfinished download")
    elif end < size:
        faults.add(
            "files are longer than their header says",
            f"{file.name} has {size:,} bytes, its header describes {end:,}",
        )
