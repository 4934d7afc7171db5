"""Names of earlier versions that are refused, and what to use in their place."""

_TIMES = (
    "predict a class, such as an event within 90 days, or write a `loss` of your own for one number for each record "
    "(docs/extending.md, Times until an event)"
)

#: What to do in place of each: a setting by the last part of its name, or a value as ``setting = value``.
REMOVED = {"time-bins": _TIMES, "task = survival": _TIMES, "[survival]": _TIMES}


def removal(name: str) -> str:
    """Return in one line what to use in place of a removed name; empty for other names."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else ""
