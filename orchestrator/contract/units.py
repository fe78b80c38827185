"""Sizes, durations, rates and sums: parsing what people write, printing what people read."""

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZE_UNITS = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9, "T": 10**12, "TB": 10**12,
    "KI": KIB, "KIB": KIB, "MI": MIB, "MIB": MIB, "GI": GIB, "GIB": GIB, "TI": TIB, "TIB": TIB,
}  # fmt: skip
_DURATION_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -~])?")
"""CSI and OSC sequences, and those of two characters (ECMA-48)."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without what acts on a terminal: escape sequences and control characters; a lone return ends a line."""
    lines = _ESCAPE_SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", lines)


def parse_size(text: str) -> int:
    """Bytes of a size such as `24GiB`, `80 GB`, `80Gi` or `512MiB`. Raises ValueError with the accepted forms."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 24GiB, 512MiB or 80GB")
    return round(float(match[1]) * unit)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `10m`, `1h30m` or `2d`. Raises ValueError with the accepted forms."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 10m or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def format_bytes(count_bytes: float) -> str:
    """`count_bytes` in the largest binary unit below it, e.g. `1.50 GiB`."""
    sign = "-" if count_bytes < 0 else ""
    size = abs(count_bytes)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:.2f} {name}"
    return f"{sign}{size:.0f} B"


def format_duration(duration_s: float) -> str:
    """`duration_s` as people say it: `8.2s`, `3m05s`, `2h10m`."""
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def format_money(amount: float, currency: str) -> str:
    """`amount` as people say it: `12.40 USD`, `0.0031 USD`."""
    return f"{amount:,.2f} {currency}" if abs(amount) >= 1 else f"{amount:.2g} {currency}"


def format_hours(device_hours: float) -> str:
    """`device_hours` with two digits at least: `1,240`, `12.3`, `0.0042`."""
    return f"{device_hours:,.0f}" if abs(device_hours) >= 100 else f"{device_hours:.3g}"


def format_rate(per_second: float) -> str:
    """`per_second` with four digits at least and never as a power of ten: `12,345`, `987.6`, `0.25`."""
    return f"{per_second:,.0f}" if abs(per_second) >= 1000 else f"{per_second:.4g}"
