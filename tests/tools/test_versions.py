"""scripts/versions.py: every row passed, and the oldest row is what the package asks
for.
"""

import json
import re
import runpy

import pytest
import torch
from packaging.specifiers import SpecifierSet
from places import ROOT

from scripts.versions import NEWEST, RESULTS, ROWS

PACKAGES = ("transformers", "torch", "triton")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def least(name):
    """The oldest release that pyproject.toml takes; 2.8.0a0 takes what a container
    makes of 2.8, too.
    """
    return re.search(rf'"{name}>=([\d.]+?)(\.0a0)?[";]', PROJECT)[1]


def test_every_row_passed():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [result["row"] for result in results] == [*ROWS]
    for result in results:
        assert result["passed"] and not result["failures"]
        if result["row"] == NEWEST:
            continue  # it has what was the newest then
        row = dict(zip(("python", *PACKAGES), result["row"].split("/"), strict=True))
        for name, version in row.items():
            assert result["versions"][name].startswith(version), result["row"]


def test_the_package_asks_for_the_oldest_row():
    python, *packages = ROWS[0].split("/")
    assert re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1] == python
    for name, version in zip(PACKAGES, packages, strict=True):
        assert version.startswith(least(name) + ".")


def test_an_older_torch_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(
        torch, "__version__", torch.torch_version.TorchVersion("2.6.0+cpu")
    )
    with pytest.raises(ImportError) as error:
        runpy.run_path(str(ROOT / "hf_rmsnorm/formula.py"))
    assert str(error.value).startswith(
        f"hf_rmsnorm needs torch {least('torch')} or newer, this is 2.6.0+cpu: "
    )


@pytest.mark.parametrize(
    "version",
    ["2.10.0a0+b4e4ee81d3.nv25.12", "2.8.0a0+5228986c39.nv25.05", "2.9.1+rocm6.4"],
)
def test_a_containers_torch_is_the_release_that_it_names(version, monkeypatch):
    asked = re.search(r'"torch(>=[^"]+)"', PROJECT)[1]
    assert SpecifierSet(asked).contains(version)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    release = runpy.run_path(str(ROOT / "hf_rmsnorm/formula.py"))["TORCH_RELEASE"]
    assert release == tuple(map(int, version.split(".")[:2]))
