"""Bytes, FLOPs and seconds, read and written for people.

``GiB`` is 1024**3 bytes and ``GB`` is 1e9 bytes, everywhere. Budgets round down, sizes never round.
"""

from __future__ import annotations

import re
from fractions import Fraction

from autoremat._errors import BudgetError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """Read a number of bytes, rounding down.

    Args:
        value: An int of bytes, or a string such as ``"24GiB"``, ``"8 GB"``, ``"512MiB"``.

    Returns:
        Bytes, a positive int.

    Raises:
        BudgetError: For anything else, with the spellings that are accepted.

    Example:
        >>> parse_bytes("1.5KiB")
        1536
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise BudgetError(f"A budget is an int of bytes or a string such as '24GiB', not {value!r}.")
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _QUANTITY.fullmatch(value)
        unit = match.group(2).lower() if match else None
        if match is None or unit not in _BYTE_UNITS:
            raise BudgetError(
                f"Cannot read {value!r} as a number of bytes. Write '24GiB' (1024**3 bytes each), "
                f"'24GB' (1e9 each), '800MiB', or a plain int."
            )
        num_bytes = int(Fraction(match.group(1)) * _BYTE_UNITS[unit])
    if num_bytes <= 0:
        raise BudgetError(f"A budget must be positive, not {value!r}.")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Write bytes in binary units with three significant digits.

    Example:
        >>> format_bytes(25_769_803_776), format_bytes(1000)
        ('24.0 GiB', '1000 B')
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size < 2**10:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 2**10
        if size < 1023.95 or unit == "TiB":
            break
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"


def format_flops(flops: float) -> str:
    """Write a count of floating point operations.

    Example:
        >>> format_flops(3_200_000_000_000)
        '3.20 TFLOP'
    """
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(flops) < 1000 or unit == "P":
            return f"{flops:.3g} {unit}FLOP" if unit == "" else f"{flops:.2f} {unit}FLOP"
        flops /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Write a duration.

    Example:
        >>> format_seconds(0.0123), format_seconds(75)
        ('12.3 ms', '75.0 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.1f} min"


def format_percent(fraction: float) -> str:
    """Write a fraction as a percentage with one digit.

    Example:
        >>> format_percent(0.1234)
        '12.3 %'
    """
    return f"{100 * fraction:.1f} %"
