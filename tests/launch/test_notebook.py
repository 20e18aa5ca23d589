"""The notebook of examples/: executed from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import re

import pytest
from ranks import REPOSITORY
from requirements import need_packages

pytestmark = pytest.mark.cold

need_packages("nbclient", "nbformat", "ipykernel")


@pytest.mark.launch
def test_the_notebook_trains_on_two_ranks_and_uses_what_was_trained(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(REPOSITORY / "examples" / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "equal on both ranks: True" in text
    assert float(re.search(r"validation accuracy: ([\d.]+)", text)[1]) > 0.85
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert (tmp_path / "runs" / "notebook" / "metrics.jsonl").exists()
