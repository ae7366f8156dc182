"""unfreeze quantize --calibrate and --measure as commands: their figures, their files, what they refuse."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.compress.calibrate.conftest import rows as random_rows
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands import quantize_rows
from unfreeze.generate.open import open_model
from unfreeze.objectives.cross_entropy import cross_entropy

pytest_plugins = ()
