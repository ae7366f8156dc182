"""Format quantities for people: bytes in binary units, counts, seconds."""

from __future__ import annotations

import math


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'. Binary units (1 GiB = 2**30 bytes), as memory is sold and reported."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_of(part: float, whole: float) -> str:
    """Format '84.0 GiB of 128.6 GiB'; if rounding hides an excess, add it."""
    left, right = format_bytes(part), format_bytes(whole)
    hidden = part > whole and left == right
    return f"{left} of {right}, {format_bytes(part - whole)} too much" if hidden else f"{left} of {right}"


def format_count(count: float) -> str:
    """1_234_567 -> '1.23 M'. Decimal units, for parameters and tokens."""
    value = float(count)
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}" if unit == "" else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"


def plural(count: int, noun: str) -> str:
    """(1, "row") -> '1 row', (1234, "row") -> '1,234 rows'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_flops(count: float) -> str:
    """2.01e12 -> '2.01 TFLOP'."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= 0.9995 * size or unit == "M":
            return f"{count / size:.3g} {unit}FLOP"
    raise AssertionError("unreachable")


def format_step(seconds: float) -> str:
    """Format a step's time with at least two significant digits, down to a microsecond: '0.0042 s'."""
    if not 0 < seconds < 1:
        return format_seconds(seconds)
    digits = min(6, 1 - math.floor(math.log10(seconds)))
    return f"{seconds:.{digits}f} s"


def format_seconds(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {total % 60:02d} s" if minutes else f"{total} s"
