"""Every method by its name in a configuration: files in strategies and one_shot are discovered."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from coterie import one_shot, strategies
from coterie.strategies import ClusteredStrategy


def _found() -> Iterator[type[ClusteredStrategy]]:
    """Every strategy that declares a name, in the module that defines it."""
    for package in (strategies, one_shot):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(import_module(module.name)).values():
                strategy = isinstance(value, type) and issubclass(value, ClusteredStrategy)
                if strategy and value.__module__ == module.name and "name" in vars(value):
                    yield value


STRATEGIES: dict[str, type[ClusteredStrategy]] = {}
for _method in _found():
    _other = STRATEGIES.setdefault(_method.name, _method)
    if _other is not _method:
        raise ValueError(f"strategy {_method.name!r} is defined in {_other.__module__} and in {_method.__module__}")
