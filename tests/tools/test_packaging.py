"""The wheel holds what it must and works without the checkout; the bootstrap survives
being interrupted.
"""

import ast
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from places import ROOT
from processes import python, ran

import hf_rmsnorm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
NAME = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hf_rmsnorm",
        source / "hf_rmsnorm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    python(*build, cwd=source, PYTHONPATH="")
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.mark.full
def test_wheel_holds_the_licence_and_the_demo_models_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (licence,) = [name for name in names if name.endswith("licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    for model in ("llama", "qwen3", "gpt2"):
        assert f"hf_rmsnorm/demo/{model}/model.safetensors" in names
    assert {"hf_rmsnorm/py.typed", "hf_rmsnorm/__init__.pyi"} <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"hf_rmsnorm"}


@pytest.mark.full
def test_the_page_says_how_large_the_wheel_is_and_why(wheel):
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    with zipfile.ZipFile(wheel) as archive:
        entries = [e for e in archive.infolist() if e.filename.endswith(".safetensors")]
    of_demos = sum(entry.compress_size for entry in entries)
    sizes = f"{wheel.stat().st_size / 1e6:.1f} MB, {of_demos / 1e6:.1f} MB of them"
    assert sizes in " ".join(page.split())


def test_the_stub_names_what_is_there():
    stub = ast.parse((ROOT / "hf_rmsnorm" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {name.name for node in imports for name in node.names} == set(
        hf_rmsnorm.__all__
    ) - {"__version__"}
    for name in hf_rmsnorm.__all__:
        assert getattr(hf_rmsnorm, name) is not None


@pytest.mark.full
def test_type_checkers_know_the_public_names_and_their_arguments(tmp_path):
    lines = {
        "report = patch_model(nn.Linear(2, 2), fuse_residual=False)": "",
        "print(report.swapped[0].path)": "",
        "patch_model(nn.Linear(2, 2), fuse_residuals=False)": '"fuse_residuals" for "patch_model"',
        "patch_model(nn.Linear(2, 2), strict=1.5)": '"strict" to "patch_model" has incompatible type "float"',
        "report.swaped": '"PatchReport" has no attribute "swaped"',
        "convert_checkpoint('a')": 'Missing positional argument "dst"',
    }
    script = tmp_path / "user.py"
    script.write_text(
        "from torch import nn\nfrom hf_rmsnorm import convert_checkpoint, patch_model\n"
        + "\n".join(lines)
        + "\n"
    )
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent"]
    command += ["--ignore-missing-imports", "--cache-dir", tmp_path, script]
    done = ran(*command, cwd=tmp_path, MYPYPATH=str(ROOT))
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    expected = [(n, said) for n, said in enumerate(lines.values(), start=3) if said]
    assert len(errors) == len(expected), done.stdout + done.stderr
    for error, (number, said) in zip(errors, expected, strict=True):
        assert int(error.split(":")[1]) == number and said in error


@pytest.mark.full
def test_installed_wheel_works_without_the_checkout(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    python(*pip, "--target", target, wheel)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import hf_rmsnorm; from hf_rmsnorm.cli.main import main\n"
        f"assert hf_rmsnorm.__file__.startswith({str(target)!r}), hf_rmsnorm.__file__\n"
        "sys.exit(main(['report', 'demo:qwen3', '--json']))"
    )
    said = python("-c", code, cwd=elsewhere, PYTHONPATH="")
    # 4 layers of 2 norms and 2 q/k norms, and the last
    assert len(json.loads(said)["swapped"]) == 17


@pytest.fixture
def bootstrap(monkeypatch, tmp_path):
    """scripts/_bootstrap.py over an empty folder; what it would install is written down
    instead.
    """
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _bootstrap

    root = tmp_path / "clone"
    root.mkdir()
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    monkeypatch.setattr(_bootstrap, "ROOT", root)
    monkeypatch.setattr(_bootstrap, "VENV", root / ".venv")
    monkeypatch.setattr(_bootstrap, "STAMP", root / ".venv" / _bootstrap.STAMP.name)
    log = []

    def make(where, **kwargs):
        log.append("venv")
        interpreter = _bootstrap.python()
        interpreter.parent.mkdir(parents=True)
        interpreter.symlink_to(sys.executable)

    monkeypatch.setattr(_bootstrap.venv, "create", make)
    monkeypatch.setattr(_bootstrap, "_pip", lambda *args: log.append(args))
    monkeypatch.setattr(_bootstrap, "_lacks_triton", lambda: False)
    _bootstrap.log = log
    return _bootstrap


def installed(log) -> list:
    """What pip was given."""
    arguments = [argument for entry in log if entry != "venv" for argument in entry]
    log.clear()
    return arguments


def test_bootstrap_installs_once_and_then_only_what_is_new(bootstrap):
    extra = str(bootstrap.EXTRAS / "quick.txt")
    bootstrap.ensure()
    first = installed(bootstrap.log)
    assert {*bootstrap.REQUIREMENTS} <= {*first} and extra not in first
    bootstrap.ensure()
    assert bootstrap.log == []
    bootstrap.ensure("quick")
    assert "venv" not in bootstrap.log and extra in installed(bootstrap.log)
    bootstrap.ensure("quick")
    bootstrap.ensure()  # has less, needs less
    assert bootstrap.log == []


@pytest.mark.parametrize("at", [0, 1], ids=["first pip", "second pip"])
def test_bootstrap_starts_anew_after_an_interrupted_run(bootstrap, monkeypatch, at):
    outcomes = Mock(side_effect=[None] * at + [KeyboardInterrupt])
    with monkeypatch.context() as context:
        context.setattr(bootstrap, "_pip", outcomes)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.ensure()
    half = bootstrap.VENV / "half-installed"
    half.write_text("")
    bootstrap.log.clear()
    bootstrap.ensure()
    assert bootstrap.log[0] == "venv" and not half.exists()


def test_bootstrap_leaves_a_foreign_environment_alone(bootstrap):
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "pyvenv.cfg").write_text("mine")
    with pytest.raises(SystemExit, match="move it away"):
        bootstrap.ensure()
    assert (bootstrap.VENV / "pyvenv.cfg").read_text() == "mine" and bootstrap.log == []


def bare(requirements) -> set:
    return {NAME.match(requirement)[0] for requirement in requirements}


def lines_of(path) -> list:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_bootstrap_and_project_name_the_same_requirements(bootstrap):
    required = bare(PROJECT["dependencies"]) - {"triton", "triton-windows"}
    assert required == set(bootstrap.REQUIREMENTS) - {"setuptools"}
    pinned = bare(lines_of(ROOT / "constraints.txt"))
    for path in bootstrap.EXTRAS.glob("*.txt"):
        unpinned = [line for line in lines_of(path) if "==" not in line]
        assert bare(unpinned) <= pinned
    assert bare(bootstrap.REQUIREMENTS) <= pinned and "triton" not in pinned
