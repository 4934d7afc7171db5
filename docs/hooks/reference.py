"""The API reference: a page per package, with the names that it exports."""

import importlib
import inspect
from pkgutil import iter_modules

from mkdocs.structure.files import File

import coterie

#: Modules whose names are public although they list none in ``__all__``.
MODULES = (
    "coterie.inference",
    "coterie.wire.messages",
    "coterie.strategies.registry",
    "coterie.wire.model_card",
    "coterie.fields.settings",
)


def packages():
    """Packages and modules with public names, sorted; the package itself first."""
    names = ["coterie", *(f"coterie.{each.name}" for each in iter_modules(coterie.__path__))]
    return [name for name in names if exports(importlib.import_module(name))]


def exports(module):
    """Names that a module declares public; of MODULES, those that it defines."""
    if module.__name__ in MODULES:
        values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        return [name for name, value in values.items() if getattr(value, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [])


def on_config(config):
    """List the pages in the navigation."""
    pages = ["reference/index.md", *({name: f"reference/{name}.md"} for name in packages())]
    for section in config.nav:
        for entry in section.get("Extend", ()):
            if "API reference" in entry:
                entry["API reference"] = pages
    return config


def on_files(files, config):
    """Add the pages and their list."""
    listed = []
    for name in packages():
        module = importlib.import_module(name)
        listed.append(f"| [`{name}`]({name}.md) | {inspect.getdoc(module).partition(chr(10))[0]} |")
        files.append(File.generated(config, f"reference/{name}.md", content=page(module)))
    text = "# API reference\n\nNames that a package exports are public; all others may change without notice.\n\n"
    text += "\n".join(["| Package | Contents |", "| --- | --- |", *listed]) + "\n"
    files.append(File.generated(config, "reference/index.md", content=text))
    return files


def page(module):
    """Every exported name: classes and functions with their docstrings, then constants and types."""
    parts, others = [f"# `{module.__name__}`", inspect.getdoc(module).replace("``", "`")], []
    for name in sorted(exports(module), key=str.lower):
        value = getattr(module, name)
        if not documented(value):
            others.append(f"| `{name}` | {described(value)} |")
        elif (owner := owner_of(value)) == module.__name__:
            parts.append(f"::: {value.__module__}.{value.__qualname__}")
        else:
            others.append(f"| `{name}` | see [{owner}]({owner}.md#{value.__module__}.{value.__qualname__}) |")
    if others:
        parts += ["## Other names", "\n".join(["| Name | Value |", "| --- | --- |", *others])]
    return "\n\n".join(parts) + "\n"


def documented(value):
    """Whether it is a class or function of Coterie."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.partition(".")[0] == "coterie"


def owner_of(value):
    """The package that documents a class or function: of those that export it, the one that defines it."""
    modules = [importlib.import_module(name) for name in packages()]
    owners = [each.__name__ for each in modules if any(getattr(each, name) is value for name in exports(each))]
    return max(owners, key=lambda name: (f"{value.__module__}.".startswith(f"{name}."), len(name)))


def described(value):
    """A constant in one line: the names of a mapping, the members of a collection, or the value."""
    if isinstance(value, dict):
        return f"mapping of {', '.join(f'`{key}`' for key in value)}"
    if isinstance(value, list | tuple):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{value}`".replace("|", "\\|")
