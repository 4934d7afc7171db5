"""Number formatting shared by the page, the figures and the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "–"
NBSP = "\u00a0"
# Characters of a setting.
_LONGEST = 300
# Two Gaussians whose means are twice this many standard deviations apart (RC-DPFL, section 4.2.1).
_SEPARATED = 3
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float | None) -> str:
    """Format a share in [0, 1] as a percentage with one decimal."""
    return MISSING if share is None or math.isnan(share) else f"{100 * share:.1f}{NBSP}%"


def capitalised(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def of_100(share: float) -> str:
    """Format an upper bound in [0, 1] as a number of 100 cases, rounded up so that it is never understated."""
    places = 1 if share < 0.99 else 2
    value = math.ceil(round(100 * share * 10**places, 6)) / 10**places
    return f"{value:.{places}f}".rstrip("0").rstrip(".")


def epsilon(value: float | None) -> str:
    """Format a privacy loss, rounded up so that it is never understated; None and NaN are infinite."""
    if value is None or not value < math.inf:
        return "∞"
    if not value > 0:
        return "0"
    places = max(2, 1 - math.floor(math.log10(value)))
    # The inner rounding keeps 7.99 * 100 = 799.0000000000001 from becoming 800.
    return f"{math.ceil(round(value * 10**places, 6)) / 10**places:.{places}f}"


def number(value: float | None) -> str:
    """Format a number with four significant digits; powers of ten are written as in 2×10⁻⁵."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def duration(seconds: float | None) -> str:
    """Format a duration: 0.05 s, 41 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None or math.isnan(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.2g}{NBSP}s"
    if seconds < 59.5:
        return f"{seconds:.0f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min{NBSP}{rest:02d}{NBSP}s"
    return f"{minutes // 60}{NBSP}h{NBSP}{minutes % 60:02d}{NBSP}min"


def index(value: float | None) -> str:
    """Format a score such as NMI with four decimals, as in papers."""
    return MISSING if value is None or math.isnan(value) else f"{value:.4f}"


def size(many: int) -> str:
    """Format a number of bytes: 812 B, 3.4 kB, 21 MB."""
    value, unit = float(many), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.2g}{NBSP}{unit}" if value < 10 and unit != "B" else f"{value:.0f}{NBSP}{unit}"


def listed(numbers: Sequence[int]) -> str:
    """`1`, `1 and 2`, or `1, 2 and 3`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def clients(number: int) -> str:
    """`1 client`, or `2 clients`."""
    return f"{number} client" + ("s" if number > 1 else "")


def of_total(found: int | None, total: int | None) -> str:
    """`4 of 4`; without the total if it is unknown."""
    if found is None:
        return MISSING
    return str(found) if total is None else f"{found} of {total}"


def setting(value: Any) -> str:
    """Format a setting as in the run's `config.toml`, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or MISSING
    if isinstance(value, dict):
        return ", ".join(f"{key} = {setting(item)}" for key, item in value.items()) or MISSING
    text = MISSING if value is None or value == "" else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"  # the schema of a table


def mixture(notes: Mapping[str, Any] | None) -> str:
    """Describe the mixture fitted to the first updates (RC-DPFL); empty if there is none."""
    if not notes or "mss" not in notes:
        return ""
    if notes["mss"] is None:
        return f"one group in the first updates, used up to round {notes['switch_round']}"
    separated = "well separated" if notes["mss"] > _SEPARATED else "not well separated"
    return (
        f"{notes['clusters']} groups in the first updates, {separated}: minimum separation score {notes['mss']:.3g} "
        f"(threshold {_SEPARATED}), overlap {notes['mpo']:.2g}, used up to round {notes['switch_round']}"
    )
