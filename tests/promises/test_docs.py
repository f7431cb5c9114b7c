"""Every page of the documentation: its snippets run, its commands, links and names
exist, and the pages build.
"""

import ast
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache

import pages
import pytest
from places import ROOT

import hf_rmsnorm
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from hf_rmsnorm.cli.main import COMMANDS, Parser, add_command, build_parser, main
from hf_rmsnorm.ops import backend
from hf_rmsnorm.patching import report
from scripts.coverage.__main__ import parser as coverage_parser
from scripts.real_configs import build_parser as configs_parser
from scripts.trainers import ROWS, TRAINERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
URLS = PROJECT["project"]["urls"]
ADDRESS = URLS["Repository"]
# Words of snippets that take more than a quick test's time.
COSTLY = (
    "convert_checkpoint",
    "verify_equivalence",
    "Trainer(",
    "generate(",
    "range(3)",
    "backward()",
    "NaiveSwap",
)


def examples():
    for block in pages.blocks("python"):
        slow = any(word in block.code for word in COSTLY)
        marks = [pytest.mark.full] if slow else []
        yield pytest.param(block, id=str(block), marks=marks)


@pytest.fixture(scope="module")
def on_a_cpu():
    """What is said of a CPU where nothing interprets the kernels: the pages show that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        backend._device_refusal.cache_clear()
        said = backend.runs_on("cpu")
    backend._device_refusal.cache_clear()
    return said


@pytest.mark.parametrize("block", list(examples()))
def test_a_snippet_runs_as_it_stands_and_prints_what_is_shown(
    block, tmp_path, monkeypatch, on_a_cpu, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "runs_on", lambda device: on_a_cpu)
    if "BitsAndBytesConfig" in block.code:
        pytest.importorskip("bitsandbytes", reason="the quantiser that this is for")
    file = tmp_path / "snippet.py"  # patch_model reads the source of its classes
    file.write_text(block.code, encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
    if block.output:
        shown = re.escape(block.output).replace(re.escape("..."), ".*")
        printed = capsys.readouterr().out
        assert re.fullmatch(shown, printed), printed


def benchmarks_parser():
    parser = Parser()
    commands = parser.add_subparsers()
    for name, module in BENCHMARKS.items():
        add_command(commands, name, module)
    return parser


def is_file(word):
    return (ROOT / word).is_file()


def has_these_tests(words):
    files = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    return all((ROOT / file).exists() for file in files)


def are_packages(words):
    return words == ["."] or all(re.fullmatch(r"[\w.\[\]-]+", word) for word in words)


# The first words of a command, and whether the others are right; a parser exits where
# they are not.
KINDS = {
    "hf-rmsnorm": lambda words: callable(build_parser().parse_args(words).run),
    "python -m benchmarks": lambda words: benchmarks_parser().parse_args(words),
    "python -m scripts.coverage": lambda words: coverage_parser().parse_args(words),
    "python -m scripts.real_configs": lambda words: configs_parser().parse_args(words),
    "python3 -m scripts.trainers": lambda words: words[0] in ROWS,
    "python -m scripts.tables": lambda words: words in ([], ["--write"]),
    "python -m pytest": has_these_tests,
    "pip install": are_packages,
    "accelerate launch --config_file": lambda words: all(map(is_file, words[:2])),
    "mkdocs": lambda words: words == ["build", "--strict"],
    "eval": lambda words: words == ["$(register-python-argcomplete hf-rmsnorm)"],
    "git clone": lambda words: words == [ADDRESS],
    "cd": lambda words: words == [ADDRESS.rpartition("/")[2]],
    "python": lambda words: is_file(words[0]),
    "python3": lambda words: is_file(words[0]),
}


def is_right(line):
    words = shlex.split(line, comments=True)
    if "=" in words[0]:  # a variable of the environment
        words = words[1:]
    words[0] = words[0].removeprefix(".venv/bin/")
    for start, check in KINDS.items():
        length = len(start.split())
        if words[:length] == start.split():
            return check(words[length:])
    return any(line == trainer.patched for trainer in TRAINERS.values())


def test_the_commands_in_blocks_exist():
    for where, line in pages.commands():
        assert is_right(line), f"{where}: {line}"


CALLS = (
    "hf-rmsnorm ",
    "python -m benchmarks",
    "python -m scripts",
    "python3 -m scripts",
)
SUBCOMMANDS = {command.__name__.rpartition(".")[2] for command in COMMANDS}


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_commands_within_sentences_exist(page):
    for span in pages.code_spans(page):
        words = span.split()
        if words[:1] == ["hf-rmsnorm"] and len(words) == 2:
            # the name of a command, and no call
            assert words[1] in SUBCOMMANDS, span
        elif span.startswith(CALLS):
            assert is_right(span), span


# hf-rmsnorm verify and convert are run by tests/promises/cli, at length.
READING = [
    "hf-rmsnorm report demo:qwen3",
    "hf-rmsnorm env",
    pytest.param("hf-rmsnorm convert demo:gpt2 --plan", marks=pytest.mark.full),
]


@pytest.mark.parametrize("line", READING)
def test_a_command_that_only_reads_runs(line, capsys):
    assert any(shown.startswith(line) for _, shown in pages.commands())
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def local(page: str, target: str) -> str:
    """A link's target as a path from the root, where it is in this repository; else ""."""
    for kind in ("blob", "raw"):
        if target.startswith(f"{ADDRESS}/{kind}/main/"):
            return target.removeprefix(f"{ADDRESS}/{kind}/main/")
    if "://" in target:
        return ""
    path, _, anchor = target.partition("#")
    file = ROOT / page
    if path:
        file = file.parent / path
    return f"{file.resolve().relative_to(ROOT)}#{anchor}"


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_lead_somewhere(page):
    for target in pages.links(page):
        path, _, anchor = local(page, target).partition("#")
        assert not path or (ROOT / path).exists(), target
        if anchor and path in pages.PAGES and not anchor.startswith("hf_rmsnorm."):
            assert anchor in pages.anchors(path), target


def test_the_links_of_the_readme_are_absolute_from_the_one_address():
    """PyPI shows the README without the files beside it."""
    ours = [target for target in pages.links("README.md") if local("README.md", target)]
    assert ours
    assert all(target.startswith(ADDRESS) for target in ours)
    assert all(url.startswith(ADDRESS) for url in URLS.values())


def test_the_readme_is_short():
    assert len(pages.PAGES["README.md"].encode()) <= 6_144


PATHS = ("scripts/", "examples/", "tests/", "docs/", "benchmarks/", "hf_rmsnorm/")
SOURCES = {path.name for folder in PATHS for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_files_that_are_named_exist(page):
    for span in pages.code_spans(page):
        if span.startswith(PATHS) and " " not in span and "*" not in span:
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"[\w/]+\.py", span) and not span.endswith("swift_plugin.py"):
            assert span.rpartition("/")[2] in SOURCES, span


@cache
def defined(path: str) -> set[str]:
    """The functions, classes and constants of a file of the package."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if hasattr(node, "name"):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            assigned = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            names |= {n.id for n in assigned if isinstance(n.ctx, ast.Store)}
    return names


def test_what_the_page_on_the_code_names_is_in_its_file():
    """It writes them as "`ops/norm.py`: `run`", with commas between several names."""
    page = pages.PAGES["docs/architecture.md"]
    named = re.findall(r"`(\S+/\S+\.py)`: ((?:`\w+`(?:, )?)+)", page)
    assert len(named) > 20
    for path, names in named:
        path = path if (ROOT / path).exists() else f"hf_rmsnorm/{path}"
        assert set(re.findall(r"\w+", names)) <= defined(path), (path, names)


def test_the_interface_page_documents_every_public_name():
    documented = re.findall(r"^::: (\S+)$", pages.PAGES["docs/api.md"], re.MULTILINE)
    objects = [pkgutil.resolve_name(path) for path in documented]
    for name in set(hf_rmsnorm.__all__) - {"__version__", "settings"}:
        assert getattr(hf_rmsnorm, name) in objects, name
    assert type(hf_rmsnorm.settings) in objects


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", menu, re.MULTILINE)
    there = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted(there)


@pytest.mark.full
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    environment["http_proxy"] = "http://127.0.0.1:9"
    command += ["--site-dir", str(tmp_path / "site")]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    files = (tmp_path / "site").rglob("*.html")
    site = "".join(path.read_text(encoding="utf-8") for path in files)
    assert "--8<--" not in site and 'id="hf_rmsnorm.patching.api.patch_model"' in site
    # the pages load nothing from elsewhere
    assert not re.findall(r'(?:src|<link[^>]* href)="https?://', site)
