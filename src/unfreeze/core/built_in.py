"""The model that comes with the package, to try things with: `--model tiny-k2`."""

from __future__ import annotations

from pathlib import Path

TINY_K2 = Path(__file__).resolve().parents[1] / "assets" / "tiny-k2"
"""Its folder: 2 million parameters, Kimi-K2-Thinking's architecture and INT4 experts, a set of rows."""
