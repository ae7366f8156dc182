"""SwiGLU as torch.compile makes it of the reference: one loop, or one kernel, per function."""

from __future__ import annotations

import torch

from unfreeze.kernels.swiglu import reference

forward = torch.compile(reference.forward, dynamic=True)
backward = torch.compile(reference.backward, dynamic=True)
backward_weighted = torch.compile(reference.backward_weighted, dynamic=True)
