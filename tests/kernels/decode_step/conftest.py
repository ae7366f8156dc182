"""Operations run as in a generation: recorded into a Program, then run."""

import pytest
import torch

from unfreeze.kernels.decode_step.program import Program, Row
from unfreeze.kernels.loops.bf16_cpu import available

DTYPES = {"float32": torch.float32, "bf16 pairs": torch.bfloat16}


@pytest.fixture(params=DTYPES)
def dtype(request):
    """Of the model: it chooses the arithmetic."""
    if request.param == "bf16 pairs" and not available():
        pytest.skip("no AVX512-bf16")
    return DTYPES[request.param]


@pytest.fixture
def recorded():
    """record(program, *rows) -> its result, for inputs [S, width]."""

    def run(record, *inputs, dtype=torch.float32, positions=None, wide_from=None):
        program = Program(len(inputs[0]), dtype)
        program._wide_from = wide_from  # None: the loops at any number of rows, on every class of CPU
        if positions is not None:
            program.positions[:] = positions
            program.place(None, len(positions))
        rows = [Row(each.float().clone(), program.pairs) for each in inputs]
        result = record(program, *rows)
        program.finish()
        program.run(len(inputs[0]))
        return result.tensor.clone() if isinstance(result, Row) else result

    return run


@pytest.fixture
def threads():
    """Sets torch's number of threads; the former one returns after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
