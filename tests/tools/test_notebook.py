"""The notebook of the examples: it is valid and clean, and names what exists. Nightly
runs it, by ``python3 scripts/quickstart.py --notebook``.
"""

import ast
import json
from importlib import import_module

import pytest
from places import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
DOCUMENT = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CODE = {}
for cell in DOCUMENT["cells"]:
    if cell["cell_type"] == "code":
        CODE[cell["id"]] = "".join(cell["source"])


def test_it_is_valid_and_holds_no_results():
    for cell in DOCUMENT["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    nbformat = pytest.importorskip(
        "nbformat", reason="comes with the notebook's requirements"
    )
    nbformat.validate(DOCUMENT)


@pytest.mark.parametrize("name", CODE)
def test_a_cell_compiles_and_imports_what_exists(name):
    tree = ast.parse(CODE[name], filename=name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.module.startswith("IPython"):
            pytest.importorskip("IPython", reason="brought by what runs a notebook")
        module = import_module(node.module)
        for alias in node.names:
            assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_it_does_what_the_readme_says_of_it():
    text = "\n".join(CODE.values())
    for word in ("patch_model(", ".generate(", "HfRmsNormCallback()", "get_peft_model"):
        assert word in text, word
    for command in ("report", "bench", "verify", "env"):
        assert f'run("{command}"' in text, command
    assert text.count('"--plot"') == 2
