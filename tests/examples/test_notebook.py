"""examples/notebook: it runs from top to bottom and draws three figures; it is stored without outputs."""

import json
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "demo.ipynb"


def test_outputs_are_stripped():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(600)
def test_it_runs_as_it_is_shipped(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name in ("DEMO_CLIENTS", "DEMO_ROUNDS", "DEMO_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernel = tmp_path / "jupyter" / "kernels" / "python3"  # this interpreter, whatever else is installed
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "test", "language": "python"}))
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert (tmp_path / "demo-run" / "privacy.json").exists()
    assert "'certified': True" in outputs[-1].data["text/plain"]
