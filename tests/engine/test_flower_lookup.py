"""Flower's simulation looks up the ClientApp in one thread while another imports the ServerApp."""

import subprocess
import sys
import tomllib

import pytest
from kit.superlinks import ROOT

# Prints what is imported of argv[1]'s app, and of Coterie, by its lookup alone.
LOOKUP = """
import sys
from flwr.supercore.object_ref import validate
folder, reference = sys.argv[1:]
assert validate(reference, project_dir=folder) == (True, None)
rooms = {"coterie", reference.partition(".")[0]}
print(*sorted(name for name in sys.modules if name.partition(".")[0] in rooms))
"""


@pytest.mark.parametrize(
    ("folder", "imported"),
    {".": "coterie coterie.client", "examples/flower-app": "clustered", "examples/guard": "guarded"}.items(),
)
def test_the_lookup_of_the_client_app_imports_no_module(folder, imported):
    reference = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    words = [sys.executable, "-c", LOOKUP, ROOT / folder, reference["clientapp"]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == imported.split(), done.stderr
