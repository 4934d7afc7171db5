"""Objects that users provide by name: ``module:object``, or an entry point of an installed package.

=============  ==========================  =================
setting        group of entry points       object
=============  ==========================  =================
``strategy``   ``coterie.strategies``      class
``clusterer``  ``coterie.clusterers``      function
``features``   ``coterie.features``        function
``dataset``    ``coterie.datasets``        function
``model``      ``coterie.models``          function
``optimizer``  ``coterie.optimizers``      function
``loss``       ``coterie.losses``          function
``trainer``    ``coterie.trainers``        class
=============  ==========================  =================

docs/extending.md has the contract of each. Names of Coterie's own take precedence over entry points. Importing an
object runs code: a deployed client imports only what its node configuration lists (client/admission.py).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Group of entry points by setting.
GROUPS = {
    "strategy": "coterie.strategies",
    "clusterer": "coterie.clusterers",
    "features": "coterie.features",
    "dataset": "coterie.datasets",
    "model": "coterie.models",
    "optimizer": "coterie.optimizers",
    "loss": "coterie.losses",
    "trainer": "coterie.trainers",
}


class PluginError(ValueError):
    """A name does not lead to a usable object; the message states why and what to do."""


def form(kind: str) -> str:
    """Return how an object of this kind is named: ``module:Class`` or ``module:function``."""
    return "module:Class" if kind in ("strategy", "trainer") else "module:function"


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name, without importing them."""
    from importlib.metadata import entry_points  # slow to import

    return {
        entry_point.name: entry_point
        for entry_point in sorted(entry_points(group=GROUPS[kind]), key=lambda entry_point: entry_point.value)
    }


def origin(entry: EntryPoint) -> str:
    """Return what an entry point names and the package that provides it."""
    return f"{entry.value} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.value


def provided(kind: str, name: str) -> bool:
    """Whether a name is ``module:object`` or that of an entry point."""
    return ":" in name or name in installed(kind)


def load(kind: str, name: str) -> Any:
    """Import the object of a name; repeated calls return the same object.

    Args:
        kind: a key of :data:`GROUPS`.
        name: ``module:object``, or the name of an entry point.

    Raises:
        PluginError: several packages register the name, or it cannot be imported.
    """
    path = name
    if ":" not in name:
        from importlib.metadata import entry_points

        registered = entry_points(group=GROUPS[kind], name=name)
        if len(registered) != 1:
            raise PluginError(
                f"{kind} '{name}': {' and '.join(sorted(map(origin, registered))) or 'no package'} registers this "
                f"name; use {form(kind)}"
            )
        path = next(iter(registered)).value
    module, _, attribute = path.partition(":")
    where = f"{kind} '{name}': cannot import {attribute or '(nothing)'} from {module or '(nothing)'}"
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise PluginError(f"{where}: {module} imports {error.name}, which is not installed") from error
        raise PluginError(
            f"{where}: there is no module {error.name}; use {form(kind)}, with its folder on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise PluginError(f"{where}: the module fails with {type(error).__name__}: {_line(error)}") from error
    try:
        for segment in attribute.split("."):
            target = getattr(target, segment)
    except AttributeError:
        near = difflib.get_close_matches(
            attribute, [member for member in vars(target) if not member.startswith("_")], n=1
        )
        hint = f"; did you mean {module}:{near[0]}?" if near else ""
        raise PluginError(f"{where}: the module has no such name; use {form(kind)}{hint}") from None
    return target


def source_hash(kind: str, name: str) -> str | None:
    """Return the SHA-256 of the module's source file in hexadecimal, without importing it; None: it has no such file.

    Args:
        kind: a key of :data:`GROUPS`.
        name: ``module:object``, or the name of an entry point.
    """
    path = name if ":" in name else next((entry.value for found, entry in installed(kind).items() if found == name), "")
    try:
        spec = importlib.util.find_spec(path.partition(":")[0])
        if spec is None or not spec.has_location or spec.origin is None:
            return None
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (ImportError, ValueError, OSError):
        return None


def sources(plugins: Mapping[str, str]) -> str:
    """Return the kinds of objects of users, each with the hash of its file, to compare those of two machines."""
    return " ".join(f"{kind}={source_hash(kind, name)}" for kind, name in plugins.items())


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name not in `known`: it suggests the closest name and lists all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown {kind} '{name}'; did you mean '{nearest}'? Available: {', '.join(names)}"


def load_function(kind: str, name: str, arguments: Iterable[str]) -> Callable[..., Any]:
    """Import a function of a name, and check that it can be called with these arguments by position.

    Raises:
        PluginError: see :func:`load`; it is no function, or has other parameters.
    """
    function: Callable[..., Any] = load(kind, name)
    arguments = tuple(arguments)
    if not callable(function):
        raise PluginError(f"{kind} '{name}': {_last(name)} is a {type(function).__name__}, not a function")
    if not accepts(function, len(arguments)):
        raise PluginError(
            f"{kind} '{name}': {_last(name)}{inspect.signature(function)} must accept ({', '.join(arguments)})"
        )
    return function


def accepts(function: Callable[..., Any], count: int, names: Iterable[str] = ()) -> bool:
    """Whether a function can be called with ``count`` positional arguments and these keywords."""
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a function written in C may state no signature
        pass
    return True


def _last(name: str) -> str:
    return name.rpartition(":")[2]


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Raise what the code of a user raises as a PluginError of one line, which names the object."""
    try:
        yield
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name} fails: {type(error).__name__}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """Return the first line of an error's text, with the place of the code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    location = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return (str(error).splitlines() or [""])[0] + location
