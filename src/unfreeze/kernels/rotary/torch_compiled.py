"""The rotation as torch.compile makes it of the reference."""

from __future__ import annotations

import torch

from unfreeze.kernels.rotary import reference

rotate = torch.compile(reference.rotate, dynamic=True)
