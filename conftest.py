"""Before any test: Triton's interpreter where there is no GPU (it has to be asked for before anything imports
Triton), no timed tests, and an event that does not conform is raised where it is emitted."""

import os

import torch
from hypothesis import HealthCheck, settings

from unfreeze.core.events import EventLog

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow at times; that is no fault of what is tested. Speed belongs in benchmarks.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

EventLog.strict = True  # a run warns instead (core/events.py); tests/core/test_core.py tries both
