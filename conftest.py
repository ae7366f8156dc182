"""Before any test: Triton's interpreter where there is no GPU (it has to be asked for before anything imports Triton), and no timed tests."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow at times; that is no fault of what is tested. Speed belongs in benchmarks.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
