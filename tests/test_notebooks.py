"""The notebooks run from top to bottom, and the committed .ipynb is the committed .py."""

from pathlib import Path

import jupytext
import nbclient
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb"))
IMAGES = {"exported_executables": 1, "step_functions": 2}


def test_every_notebook_is_known():
    assert sorted(IMAGES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_is_in_step(name):
    def cells(suffix):
        return [(c.cell_type, c.source) for c in jupytext.read(NOTEBOOKS / f"{name}{suffix}").cells]

    assert cells(".ipynb") == cells(".py")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name):
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    images = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(images) == IMAGES[name]
