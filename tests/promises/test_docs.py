"""Every page of the documentation: its snippets run, its commands, links and names
exist, and the pages build.
"""

import re
import runpy
import shlex
import sys
from functools import cache

import pages
import pytest
from places import ROOT
from processes import python
from transformers import AutoModelForCausalLM

import hf_rmsnorm
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from hf_rmsnorm.cli.main import COMMANDS, Parser, add_command, build_parser
from hf_rmsnorm.cli.run import split
from hf_rmsnorm.demo import demo_path
from hf_rmsnorm.ops import backend, launches
from hf_rmsnorm.patching import report
from scripts import interface
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
NAME = ADDRESS.rpartition("/")[2]
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
        marks = []
        if any(word in block.code for word in COSTLY):
            marks = [pytest.mark.full]
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
        printed = capsys.readouterr().out
        assert pages.is_as_shown(block.output, printed), printed


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What is said of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "device_refusal", lambda kind, index=None: None)
        patch.setattr(backend, "interprets", lambda: False)
        said = backend.runs_on("cuda:0")
    monkeypatch.setattr(report, "runs_on", lambda device: said)
    return said


# The blocks of text that follow no snippet: outputs that tests look up, and drawings.
OTHER_TEXTS = {
    "docs/start.md": 2,  # the two tests below
    "docs/programs.md": 1,  # the first of them
    "docs/troubleshooting.md": 1,  # unit/ops/test_launches_unavailable.py
    "docs/architecture.md": 4,
}


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_test_makes_every_output_that_is_shown(page):
    texts = [block for block in pages.blocks("text") if block.page == page]
    made = [b for b in pages.blocks("python") if b.page == page and b.output]
    assert len(texts) == len(made) + OTHER_TEXTS.get(page, 0)


def test_the_end_of_a_report_on_a_gpu_is_as_shown(on_a_gpu):
    model = AutoModelForCausalLM.from_pretrained(demo_path("qwen3"))
    printed = f"{hf_rmsnorm.patch_model(model)}\n"
    assert printed.endswith(pages.shown_behind("docs/start.md", "the report ends so:"))
    line = f"runs on {on_a_gpu['device']}: {on_a_gpu['reason']}"
    for page in ("docs/training.md", "docs/programs.md"):
        assert f"11 norms swapped, 0 skipped; {line}" in pages.PAGES[page]


def test_launches_on_a_gpu_are_as_shown(capsys, tmp_path):
    """Triton's interpreter launches the same: only the device has another name."""
    (block,) = [b for b in pages.blocks("python") if "print(launches)" in b.code]
    file = tmp_path / "snippet.py"
    file.write_text(block.code, encoding="utf-8")
    launches.forget_launches()  # so that each is compared at its first use
    runpy.run_path(str(file))
    printed = capsys.readouterr().out.replace("on cpu at", "on cuda:0 at")
    assert printed == pages.shown_behind("docs/start.md", "On a GPU:")


def test_ci_runs_the_commands_of_the_readme_in_its_order():
    """All but those for programs of others, models of your own, and the installation."""
    told = pages.PAGES["README.md"]
    ran = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[5:]
    places = []
    for line in ran:
        line = line.removeprefix(".venv/bin/").removesuffix(' --all "$@"')
        places.append(told.index(line))
    assert len(places) == 6 and places == sorted(places)


def benchmarks_parser():
    parser = Parser()
    commands = parser.add_subparsers()
    for name, module in BENCHMARKS.items():
        add_command(commands, name, module)
    return parser


def is_file(word):
    return (ROOT / word).is_file()


def has_these_tests(words):
    files = [word.partition("::")[0] for word in words]
    return all((ROOT / f).exists() for f in files if f.startswith("tests/"))


def are_packages(words):
    return re.fullmatch(r"[\w.\[\] -]+", " ".join(words))


def match_files(words):
    return all(any(ROOT.glob(word)) for word in words)


def begins_with_a_file(words):
    return is_file(words[0])


# In environments of their own: no test of this folder meets them.
INSTALLED = ("lm_eval", "transformers", "train.py", "PROGRAM")
MODULES = ("trl.scripts.", "llamafactory.launcher", "package")


def is_a_run(words):
    """Of `hf-rmsnorm run`: options that it has, and a program that a clone has."""
    options, program = split(words)
    build_parser().parse_args(["run", *options])
    if program[0] == "-m":
        return program[1].startswith(MODULES)
    return program[0] in INSTALLED or is_file(program[0])


# The first words of a command, and whether the others are right; a parser exits where
# they are not.
KINDS = {
    "hf-rmsnorm run": is_a_run,
    "accelerate launch -m hf_rmsnorm run": is_a_run,
    "accelerate launch --num_processes 1 -m hf_rmsnorm run": is_a_run,
    "torchrun --nproc-per-node 2 -m hf_rmsnorm run": is_a_run,
    "hf-rmsnorm": lambda words: callable(build_parser().parse_args(words).run),
    "python -m benchmarks": lambda words: benchmarks_parser().parse_args(words),
    "python -m scripts.coverage": lambda words: coverage_parser().parse_args(words),
    "python -m scripts.real_configs": lambda words: configs_parser().parse_args(words),
    "python3 -m scripts.trainers": lambda words: words[0] in ROWS,
    "python -m scripts.programs": lambda words: words == [],
    "python -m scripts.tables": lambda words: words in ([], ["--write"]),
    "python -m docs.draw_speeds": lambda words: words == [],
    "python -m pytest": has_these_tests,
    "pip install": are_packages,
    "accelerate launch --config_file": lambda words: match_files(words[:2]),
    "mkdocs": lambda words: words == ["build", "--strict"],
    "sed -i": lambda words: match_files(words[1:]),
    "eval": lambda words: words == ["$(register-python-argcomplete hf-rmsnorm)"],
    "git clone": lambda words: words == [ADDRESS],
    "cd": lambda words: words == [NAME],
    "python": begins_with_a_file,
    "python3": begins_with_a_file,
}


def is_right(line):
    words = shlex.split(line, comments=True)
    if "=" in words[0]:  # a variable of the environment
        words = words[1:]
    words[0] = words[0].removeprefix(".venv/bin/")
    for kind, check in KINDS.items():
        start = kind.split()
        length = len(start)
        if words[:length] == start:
            return check(words[length:])
    return line in [trainer.patched for trainer in TRAINERS.values()]


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
        if re.fullmatch(r"hf-rmsnorm \S+", span):
            # the name of a command, and no call
            name = span.split()[1]
            assert name in SUBCOMMANDS, span
        elif span.startswith(CALLS):
            assert is_right(span), span


def local(page: str, target: str) -> str:
    """A link's target as a path from the root, where it is in this repository; else ""."""
    for kind in ("blob", "raw"):
        start = f"{ADDRESS}/{kind}/main/"
        if target.startswith(start):
            return target.removeprefix(start)
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
        assert (ROOT / path).exists(), target
        if anchor and path in pages.PAGES:
            assert anchor in pages.anchors(path), target


def test_the_links_of_the_readme_are_absolute_from_the_one_address():
    """PyPI shows the README without the files beside it."""
    targets = pages.links("README.md")
    ours = [target for target in targets if local("README.md", target)]
    assert ours
    for url in (*ours, *URLS.values()):
        assert url.startswith(ADDRESS)


def test_the_readme_is_short():
    readme = pages.PAGES["README.md"]
    assert len(readme.encode()) <= 6_144


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
    """The functions, classes and constants of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:def |class )?(\w+)", source, re.MULTILINE))


def test_what_the_page_on_the_code_names_is_in_its_file():
    """It writes them as "`ops/norm.py`: `run`", with commas between several names."""
    page = pages.PAGES["docs/architecture.md"]
    named = re.findall(r"`(\S+/\S+\.py)`: ((?:`\w+`(?:, )?)+)", page)
    assert len(named) > 20
    for path, names in named:
        if not (ROOT / path).exists():
            path = f"hf_rmsnorm/{path}"
        words = re.findall(r"\w+", names)
        assert defined(path).issuperset(words), (path, names)


def test_each_change_begins_in_one_place():
    _, _, table = pages.PAGES["docs/architecture.md"].partition(
        "| begin with |\n|---|---|\n"
    )
    rows, _, _ = table.partition("\n\n")
    rows = rows.splitlines()
    assert 20 <= len(rows) <= 25
    for row in rows:
        assert re.fullmatch(r"\| [^|]+ \| `\S+\.py`: `\w+` \|", row), row


def test_the_interface_page_documents_every_public_name():
    documented = interface.objects()
    for name in set(hf_rmsnorm.__all__) - {"__version__", "settings"}:
        assert getattr(hf_rmsnorm, name) in documented, name
    assert type(hf_rmsnorm.settings) in documented


def test_every_page_is_in_the_menu():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    _, _, menu = settings.partition("\nnav:")
    listed = re.findall(r": (\S+\.md)$", menu, re.MULTILINE)
    there = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted(there)


@pytest.mark.full
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra 'docs'")
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    offline = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    python(*build, **offline)
    pages_made = tmp_path.rglob("*.html")
    site = "".join(path.read_text(encoding="utf-8") for path in pages_made)
    assert 'id="patch_model"' in site
    # the pages load nothing from elsewhere
    assert not re.findall(r'(?:src|<link[^>]* href)="https?://', site)
