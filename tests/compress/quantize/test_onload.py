"""A release packed while it is loaded is, tensor for tensor, the folder that `unfreeze quantize` writes."""

import json

import pytest
import torch

from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.quantize import formats
from unfreeze.compress.quantize.onload import packed_on_load
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.compress.quantize.write import inputs_of, write
from unfreeze.generate.open import open_model

FORMATS = tuple(formats.FORMATS)


@pytest.fixture(scope="module")
def written(bases, tmp_path_factory):
    """(base, format, modules) -> the manifest of the folder that quantize writes."""
    known = {}

    def make(base: str, to: str, modules: tuple[str, ...] = ("all-linear",)):
        if (base, to, modules) not in known:
            manifest, out = open_checkpoint(bases[base]), tmp_path_factory.mktemp("out") / f"{base}-{to}"
            write(quantize_work(manifest, to, modules), out, inputs_of(manifest, to, modules), None)
            known[base, to, modules] = open_checkpoint(out)
        return known[base, to, modules]

    return make


def loaded(manifest) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model in memory."""
    model = open_model(manifest, torch.float32)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in a bit."""
    assert one.keys() == other.keys()
    return [
        name
        for name, tensor in one.items()
        if tensor.dtype != other[name].dtype
        or tensor.shape != other[name].shape
        or not torch.equal(
            tensor.detach().contiguous().view(-1).view(torch.uint8),
            other[name].detach().contiguous().view(-1).view(torch.uint8),
        )
    ]


@pytest.mark.parametrize("base", ["llama", "moe", "stacked"])
@pytest.mark.parametrize("to", FORMATS)
def test_the_model_is_that_of_the_folder(bases, written, base: str, to: str) -> None:
    """The same names, dtypes, shapes and bits: in the manifest, as files and in memory."""
    folder, packed = written(base, to), packed_on_load(open_checkpoint(bases[base]), to, ("all-linear",))
    facts = [{i.name: (i.dtype, i.shape, i.nbytes) for i in m.tensors.values()} for m in (folder, packed)]
    assert facts[0] == facts[1]
    assert packed.nbytes == folder.nbytes
    assert packed.config == json.loads((folder.path / "config.json").read_text())
    tensors = [{n: stored_tensor(i) for n, i in m.tensors.items()} for m in (folder, packed)]
    assert not differences(*tensors)
    memory = loaded(folder)
    assert not differences(memory, loaded(packed))
    assert any(tensor.dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn) for tensor in memory.values())
