"""The version in all its places, the README of a package index, and the package without its extras."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import generated
import pytest
import yaml

from coterie import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    assert generated.with_version() == {path: path.read_text() for path in generated.with_version()}, "make settings"
    assert PROJECT["version"] == __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_changelog_is_ready_for_the_tag():
    """Unreleased changes come first, then this version with its date."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    (date,) = re.findall(r"^date-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert headings[1].endswith(date)


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py; hatchling is in the environment of a build only."""
    plugin = SimpleNamespace(MetadataHookInterface=object)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", plugin)
    monkeypatch.syspath_prepend(ROOT)
    import hatch_build

    return hatch_build


TEXT = """# Title

![Lines](docs/demo.png)

*The demo:
its caption.*

See [privacy](docs/privacy.md#joint), [Flower](https://flower.ai) and [below](#below).
"""


def test_without_a_repository_nothing_leads_nowhere(hook):
    shown = hook.index_readme(TEXT, "1.2.3", None)
    assert shown == "# Title\n\nSee privacy, [Flower](https://flower.ai) and [below](#below).\n"
    whole = hook.index_readme((ROOT / "README.md").read_text(), __version__, None)
    assert re.findall(r"\]\((?!https?:|#)", whole) == []
    assert "](" in (ROOT / "README.md").read_text()


def test_links_lead_to_the_tag_in_the_repository(hook):
    shown = hook.index_readme(TEXT, "1.2.3", "https://example.org/coterie/")
    assert "![Lines](https://example.org/coterie/raw/v1.2.3/docs/demo.png)" in shown
    assert "[privacy](https://example.org/coterie/blob/v1.2.3/docs/privacy.md#joint)" in shown
    assert "[Flower](https://flower.ai)" in shown
    assert "[below](#below)" in shown


@pytest.mark.parametrize("urls", [{}, {"urls": {"Repository": "https://example.org/coterie"}}])
def test_the_hook_reads_address_and_version_from_the_project(hook, urls):
    reader, project = hook.ReadmeHook(), {"version": "1.2.3", **urls}
    reader.root = str(ROOT)
    reader.update(project)
    assert project["readme"]["content-type"] == "text/markdown"
    assert ("https://example.org/coterie/blob/v1.2.3/" in project["readme"]["text"]) == bool(urls)


def test_supported_versions_of_python_are_declared():
    stated = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    assert stated == {"3.11", "3.12", "3.13"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_templates_for_issues_are_forms():
    templates = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(templates) == 3
    for form in templates:
        assert {"name", "description", "body"} <= form.keys()
        fields = [each for each in form["body"] if each["type"] != "markdown"]
        assert all(each["id"] and each["attributes"]["label"] for each in fields)


def test_the_workflow_runs_targets_that_are_there():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    targets = job["strategy"]["matrix"]["target"]
    assert "make ${{ matrix.target }}" in [step.get("run") for step in job["steps"]]
    assert targets == [each for each in targets if re.search(rf"^{each}:", (ROOT / "Makefile").read_text(), re.M)]


def test_documented_extras_are_there():
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = {name for group in re.findall(r"(?:coterie|'\.)\[([a-z,]+)\]", text) for name in group.split(",")}
    assert {"excel", "metrics", "parquet", "simulation", "vision"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


#: Runs commands without the packages of all extras, until one fails.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
absent = {"torchvision", "ray", "pyarrow", "python_calamine", "prometheus_client", "mlflow", "onnx", "tensorboard"}
class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.partition(".")[0] in absent else super().find_spec(name, *rest)
sys.meta_path = [Present if finder is PathFinder else finder for finder in sys.meta_path]
from coterie.cli import main
for words in sys.argv[1:]:
    sys.argv = ["coterie", *words.split("|")]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.mark.slow
def test_the_demo_runs_without_extras_and_a_data_set_names_the_one_that_it_needs(tmp_path):
    """torchvision is the one that a CPU-only PyTorch lacks most often."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for what in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{what}-ubyte").touch()
    demo = ["run", "--rounds", "2", "--clients", "60", "--out", "demo"]
    mnist = ["run", "--dataset", "mnist", "--data-dir", str(tmp_path), "--rounds", "1", "--out", "run"]
    command = [sys.executable, "-c", WITHOUT, "|".join(demo), "|".join(mnist)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "demo" / "report.html").exists(), done.stderr
    assert done.returncode == 1
    assert "pip install 'coterie[vision]'" in done.stderr
