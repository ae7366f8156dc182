"""Personal data by pattern: e-mail addresses, IP addresses, phone and identity numbers. Off by default.

Patterns find what has a form. Names, addresses and what a text says about someone have none.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}\b", re.A
)
IP = re.compile(
    r"(?<![\d.])(?<!\bv)(?<!\bV)(?<!version )(?<!Version )(?<!section )(?<!Section )"
    r"(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)"
)
IDENTITY = re.compile(r"(?<!\d)\d{17}[\dXx](?![\dXx])")
CARD = re.compile(r"(?<![\d-])[2-6](?:[ -]?\d){12,18}(?![\d-])")
PHONE = re.compile(
    r"(?<![\d+.-])(?<!0x)(?:\+\d{1,3}[ -]?\(?\d{1,4}\)?(?:[ -]?\d{2,4}){2,4}"
    r"|(?:(?:00)?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}"
    r"|\(?\d{3}\)?[ -]\d{3}-\d{4}|0\d{2,3}-\d{7,8})(?![\d-]|\.\d)"
)
_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def is_public(address: str) -> bool:
    """True for an IPv4 address that is routed; 127.0.0.1 and version 1.2.3.400 are no one's."""
    try:
        return ipaddress.IPv4Address(address).is_global
    except ValueError:
        return False


def is_identity(number: str) -> bool:
    """Check digit of a Chinese identity number: sum(w_i d_i) mod 11 -> 1 0 X 9 8 7 6 5 4 3 2 (GB 11643)."""
    total = sum(weight * int(digit) for weight, digit in zip(_WEIGHTS, number[:17], strict=True))
    return "10X98765432"[total % 11] == number[17].upper()


def is_card(number: str) -> bool:
    """Check digit of a card number (Luhn, ISO/IEC 7812): every second digit doubled from the right."""
    digits = [int(char) for char in number if char.isdigit()][::-1]
    doubled = (2 * digit - 9 * (digit > 4) for digit in digits[1::2])
    return any(digits) and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _always(match: str) -> bool:
    return True


KINDS: dict[str, tuple[re.Pattern[str], Callable[[str], bool], str]] = {
    "email": (EMAIL, _always, "<EMAIL>"),
    "identity": (IDENTITY, is_identity, "<ID_NUMBER>"),
    "phone": (PHONE, _always, "<PHONE>"),
    "card": (CARD, is_card, "<CARD_NUMBER>"),
    "ip": (IP, is_public, "<IP_ADDRESS>"),
}
"""Kind -> (pattern, check of a match, what replaces it), in the order in which they are replaced."""


def replaced(text: str) -> tuple[str, dict[str, int]]:
    """Replace personal data; return the text and the number of replacements by kind."""
    counts: dict[str, int] = {}
    for kind, (pattern, _, instead) in KINDS.items():

        def swap(match: re.Match[str], kind: str = kind, instead: str = instead) -> str:
            if not KINDS[kind][1](match[0]):
                return match[0]
            counts[kind] = counts.get(kind, 0) + 1
            return instead

        text = pattern.sub(swap, text)
    return text, counts
