"""The model in the package, for trying things out: `--model tiny-k2`."""

from __future__ import annotations

from pathlib import Path

TINY_K2 = Path(__file__).resolve().parents[1] / "assets" / "tiny-k2"
"""Folder of tiny-k2: 2 million parameters, Kimi-K2-Thinking's architecture, INT4 experts, and data rows."""
