"""Every page of the documentation: its snippets run, its commands and links exist, and its pages build."""

import contextlib
import importlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
from places import PYTHONPATH, ROOT

import hf_rmsnorm
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from hf_rmsnorm.cli.main import COMMANDS, Parser, add_command, build_parser, main
from hf_rmsnorm.ops import backend
from scripts.coverage.__main__ import parser as coverage_parser
from scripts.real_configs import build_parser as real_configs_parser
from scripts.trainers import ROWS, TRAINERS

# Words of snippets that take more than a quick test's time.
COSTLY = ("convert_checkpoint", "verify_equivalence", "Trainer(", "generate(", "range(3)", "backward()")


def examples():
    for block in pages.blocks("python"):
        slow = any(word in block.code for word in COSTLY)
        yield pytest.param(block, id=str(block), marks=[pytest.mark.full] if slow else [])


@pytest.fixture(scope="module")
def on_a_cpu():
    """What is said of a CPU where nothing interprets the kernels: the pages show that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        backend._device_refusal.cache_clear()
        said = backend.describe_backend("cpu")
    backend._device_refusal.cache_clear()
    return said


@pytest.mark.parametrize("block", list(examples()))
def test_a_snippet_runs_as_it_stands_and_prints_what_is_shown(block, tmp_path, monkeypatch, on_a_cpu):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "describe_backend", lambda device: on_a_cpu)
    if "from kernels import" in block.code:
        pytest.importorskip("kernels", reason="the library that this is for, of scripts/requirements")
    if "BitsAndBytesConfig" in block.code:
        pytest.importorskip("bitsandbytes", reason="the quantiser that this is for, of scripts/requirements")
    lines = block.code.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, str(block), (len(block.code), None, lines, str(block)))  # as of a file
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})
    if block.output:
        shown = re.escape(block.output).replace(re.escape("..."), ".*")
        assert re.fullmatch(shown, printed.getvalue()), printed.getvalue()


SUBCOMMANDS = {command.__name__.rpartition(".")[2] for command in COMMANDS}


PATCHED = {trainer.patched for trainer in TRAINERS.values()}  # scripts/trainers.py runs them


def benchmarks_parser():
    parser = Parser()
    commands = parser.add_subparsers()
    for name, module in BENCHMARKS.items():
        add_command(commands, name, module)
    return parser


def is_file(word):
    return (ROOT / word).is_file()


def has_these_tests(words):
    return all((ROOT / word.partition("::")[0]).exists() for word in words if word.startswith("tests/"))


def are_packages(words):
    return words == ["."] or all(re.fullmatch(r"[\w.\[\]-]+", word) for word in words)


# The first words of a command, and whether the others are right; a parser exits where they are not.
KINDS = {
    "hf-rmsnorm": lambda words: callable(build_parser().parse_args(words).run),
    "python -m benchmarks": lambda words: benchmarks_parser().parse_args(words),
    "python -m scripts.coverage": lambda words: coverage_parser().parse_args(words),
    "python -m scripts.real_configs": lambda words: real_configs_parser().parse_args(words),
    "python3 -m scripts.trainers": lambda words: words[0] in ROWS,
    "python -m pytest": has_these_tests,
    "pytest": has_these_tests,
    "pip install": are_packages,
    "accelerate launch --config_file": lambda words: is_file(words[0]) and is_file(words[1]),
    "mkdocs": lambda words: words == ["build", "--strict"],
    "eval": lambda words: words == ["$(register-python-argcomplete hf-rmsnorm)"],
    "git": bool,
    "cd": bool,
    "python": lambda words: words[0].endswith(".py") and is_file(words[0]),
    "python3": lambda words: words[0].endswith(".py") and is_file(words[0]),
}


def is_right(words):
    for start, check in KINDS.items():
        length = len(start.split())
        if words[:length] == start.split():
            return check(words[length:])
    return False


@pytest.mark.parametrize(
    "where, line", pages.commands(), ids=[f"{where} {line.split('#')[0].strip()}" for where, line in pages.commands()]
)
def test_a_command_exists(where, line):
    words = shlex.split(line, comments=True)
    if "=" in words[0]:  # a variable of the environment
        words = words[1:]
    words[0] = words[0].removeprefix(".venv/bin/")
    if line in PATCHED:
        assert is_file(words[-1])
    else:
        assert is_right(words), f"{where}: {line}"


@pytest.mark.parametrize("where, line", sorted(set(pages.inline_commands())))
def test_a_command_within_a_sentence_exists(where, line):
    words = line.split()
    if words[0] == "hf-rmsnorm" and len(words) < 3:  # it speaks of the command, and not of a call
        assert set(words[1:]) <= SUBCOMMANDS
    elif line != "python -m hf_rmsnorm":
        test_a_command_exists(where, line)


@pytest.mark.parametrize("name", ["report", "env"])
def test_a_cheap_command_runs(name, capsys):
    line = next(line for _, line in pages.commands() if line.startswith(f"hf-rmsnorm {name} "))
    assert main(shlex.split(line, comments=True)[1:]) == 0
    assert capsys.readouterr().out


# hf-rmsnorm verify and convert are run by tests/promises/cli, at length.
@pytest.mark.full
@pytest.mark.parametrize("line", ["hf-rmsnorm inspect demo:gpt2", "hf-rmsnorm convert demo:gpt2 --plan"])
def test_a_command_that_only_reads_runs(line, capsys):
    assert any(shown.startswith(line) for _, shown in pages.commands())
    assert main(shlex.split(line)[1:]) == 0


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:scripts|examples|tests|docs|benchmarks|hf_rmsnorm)/[\w./-]*)`")
NAME = re.compile(r"`(?:\w+/)*([\w-]+\.py)`")
FOLDERS = ("hf_rmsnorm", "tests", "benchmarks", "scripts", "examples", "docs")
SOURCES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_and_paths_lead_somewhere(page):
    text, folder = pages.PAGES[page], (ROOT / page).parent
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / page
        assert file.exists() and file.is_relative_to(ROOT), target
        if anchor and file.suffix == ".md" and not anchor.startswith("hf_rmsnorm."):
            assert anchor in anchors(file.read_text(encoding="utf-8")), target
    if page == "CHANGELOG.md":  # which names what there was
        return
    assert not [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not [name for name in NAME.findall(text) if name not in SOURCES]


def anchors(text: str) -> set[str]:
    """As both GitHub and MkDocs make them of headings without punctuation."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_interface_page_documents_every_public_name():
    documented = re.findall(r"^::: (\S+)$", pages.PAGES["docs/api.md"], re.MULTILINE)
    objects = []
    for path in documented:
        module, _, name = path.rpartition(".")
        objects.append(getattr(importlib.import_module(module), name))
    public = [getattr(hf_rmsnorm, name) for name in hf_rmsnorm.__all__ if name not in ("__version__", "settings")]
    assert not [o for o in public if o not in objects]
    assert type(hf_rmsnorm.settings) in objects


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE)) == {
        page.removeprefix("docs/") for page in pages.PAGES if page.startswith("docs/")
    }


@pytest.mark.full
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    site = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html"))
    assert "--8<--" not in site and 'id="hf_rmsnorm.patching.api.patch_model"' in site
    assert not re.findall(r'(?:src|<link[^>]* href)="https?://', site), "the pages load nothing from elsewhere"


@pytest.mark.full
@pytest.mark.parametrize("name", ["patch_and_prove", "convert_and_look"])
def test_a_tutorial_runs_and_prints_what_its_page_shows(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / f"docs/tutorials/{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = (ROOT / f"docs/tutorials/{name}.txt").read_text(encoding="utf-8")
    # Which bits a matrix product has depends on the machine: the words are compared, and the whole numbers of a report.
    fraction = re.compile(r"\b\d+(\.\d+)?(e[+-]?\d+)?\b")

    def words(text):
        return [fraction.sub("N", line) for line in text.splitlines() if not line.startswith("  PASS        model.")]

    assert words(done.stdout) == words(shown)
    assert f'--8<-- "tutorials/{name}.py"' in pages.PAGES[f"docs/tutorials/{name}.md"]
