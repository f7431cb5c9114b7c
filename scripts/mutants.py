"""Break the code on purpose and see that a test notices: ``python -m scripts.mutants [options]``.

Each mutant is the package with one change: a guard's condition negated, a comparison turned, a part of a key dropped, a
constant off by one. The tests that run its line run on it, the quickest first, until one fails. What no test notices is
a survivor, printed with its place; one that is known to change nothing stands in KNOWN, with the reason.

    python -m scripts.mutants --list                          how many mutants each file has
    python -m scripts.mutants --sample 300 --jobs 2           so many, drawn evenly
    python -m scripts.mutants hf_rmsnorm/kernels/plan.py      all of a file
    python -m scripts.mutants hf_rmsnorm/ops/backend.py:81    those of a line

Which tests run which lines is found first, by running them all once; ``--lines FILE`` keeps that for the next time.
Each mutant is tested in a copy of the package, by a process forked from one that has torch and transformers loaded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "ops", "fused")
TESTS = ("tests/unit/kernels", "tests/unit/ops", "tests/unit/fused", "tests/promises/fusion",
         "tests/promises/training/test_memory_efficient.py", "tests/promises/training/test_written_inputs.py",
         "tests/promises/training/test_autocast.py", "tests/promises/state/test_changes.py",
         "tests/promises/generation/test_counts.py")  # fmt: skip
KEYS = ("key", "like", "dtypes", "strides", "table", "versions")  # names that a tuple of what a thing depends on has
TURNED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
          ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
# Survivors that change no result: (file, before, after) -> why. After a change of the code they are asked again.
KNOWN: dict[tuple[str, str, str], str] = {}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text `before` at a line became `after`."""

    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before}  ->  {self.after}"


def changes(tree: ast.Module):
    """(node, what stands in its place) of each mutant, in the order of the source."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.BoolOp):
            for at in range(len(node.values)):
                rest = node.values[:at] + node.values[at + 1 :]
                yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, ast.Constant(node.value + 1 if type(node.value) is int else node.value * 2)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            of_key = getattr(node.targets[0], "id", None) in KEYS
            for at in range(len(node.value.elts) if of_key else 0):
                yield node.value, ast.Tuple(node.value.elts[:at] + node.value.elts[at + 1 :], ast.Load())


def mutants_of(path: str) -> list[tuple[Mutant, str]]:
    """Every mutant of a file, with the source of the whole file."""
    whole = (ROOT / path).read_bytes()
    starts = [0]
    for line in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, instead in changes(ast.parse(whole)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(instead)))})"
        text = (whole[:first] + after.encode() + whole[last:]).decode()
        before = " ".join(whole[first:last].decode().split())
        found.append((Mutant(path, node.lineno, before, after), text))
    return found


# --- which tests run which lines ----------------------------------------------------------------------------------


class Lines:
    """A pytest plugin that notes which lines of the package each test runs, and for how long."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, list[str]] = defaultdict(list)  # "file:line" -> tests

    def pytest_runtest_protocol(self, item):
        self.seen: set[str] = set()
        self.began = time.process_time()
        sys.settrace(self._trace)

    def pytest_runtest_logfinish(self, nodeid):
        sys.settrace(None)
        self.seconds[nodeid] = time.process_time() - self.began
        for place in self.seen:
            self.tests[place].append(nodeid)

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if "/hf_rmsnorm/" not in name or name.split("/hf_rmsnorm/")[1].split("/")[0] not in ROOMS:
            return None
        path = "hf_rmsnorm/" + name.split("/hf_rmsnorm/")[-1]

        def local(frame, event, _):
            if event == "line":
                self.seen.add(f"{path}:{frame.f_lineno}")
            return local

        self.seen.add(f"{path}:{frame.f_lineno}")
        return local


def find_lines(target: Path) -> dict:
    """Run every test once, in a process of its own, and read what it noted."""

    def work() -> int:
        import pytest

        plugin = Lines()
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not full and not nightly", *TESTS], plugins=[plugin])
        target.write_text(json.dumps({"seconds": plugin.seconds, "tests": plugin.tests}), encoding="utf-8")
        return 0

    os.chdir(ROOT)
    os.waitpid(_fork(work), 0)
    return json.loads(target.read_text(encoding="utf-8"))


def covering(mutant: Mutant, lines: dict) -> list[str]:
    """The tests that run a mutant's line, the quickest first, and those that differ most from one another."""
    tests = sorted(lines["tests"].get(f"{mutant.path}:{mutant.line}", ()), key=lines["seconds"].get)
    seen: dict[str, int] = defaultdict(int)
    order = []
    for test in tests:  # one of each test function, then the second of each, and so on
        name = test.split("[")[0]
        order.append((seen[name], lines["seconds"][test], test))
        seen[name] += 1
    return [test for *_, test in sorted(order)]


# --- one mutant ---------------------------------------------------------------------------------------------------


def _fork(work) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        code = work()
    os._exit(code)


def start(mutant: Mutant, text: str, tests: list[str], folder: Path, timeout: int) -> int:
    """The process id of a run of these tests on a mutant; its exit code is pytest's."""

    def work() -> int:
        import pytest

        shutil.copytree(ROOT / "hf_rmsnorm", folder / "hf_rmsnorm", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name in ("benchmarks", "scripts", "examples", "docs", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        (folder / mutant.path).write_text(text, encoding="utf-8")
        os.chdir(folder)
        sys.path[0] = str(folder)
        os.environ["PYTHONPATH"] = str(folder)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        signal.alarm(timeout)
        return int(pytest.main(["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist",
                                f"--rootdir={folder}", *tests]))  # fmt: skip

    return _fork(work)


def judge(mutant: Mutant, code: int, folder: Path) -> dict:
    output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    by = by.removeprefix("FAILED ").split(" - ")[0] or ("it ends otherwise" if code else "")
    return asdict(mutant) | {"noticed": code != 0, "by": by, "reason": KNOWN.get(_known_as(mutant), "")}


def _known_as(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.path, mutant.before, mutant.after


def run(chosen: list, lines: dict, jobs: int, most: int, timeout: int):
    """The verdict on each mutant, as it comes."""
    waiting, running = list(reversed(chosen)), {}
    with tempfile.TemporaryDirectory() as root:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant, text = waiting.pop()
                tests = covering(mutant, lines)[:most]
                if not tests:
                    reason = KNOWN.get(_known_as(mutant), "no test runs it")
                    yield asdict(mutant) | {"noticed": False, "by": "", "reason": reason}
                    continue
                folder = Path(tempfile.mkdtemp(dir=root))
                running[start(mutant, text, tests, folder, timeout)] = mutant, folder
            if running:
                pid, status = os.wait()
                mutant, folder = running.pop(pid)
                yield judge(mutant, os.waitstatus_to_exitcode(status), folder)
                shutil.rmtree(folder, ignore_errors=True)


def load_what_all_need() -> None:
    """Import what every test needs and no mutant changes, so that each forked process has it."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(1)
    import accelerate  # noqa: F401
    import hypothesis  # noqa: F401
    import transformers
    import triton.language  # noqa: F401

    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "T5Model", "Trainer"):
        getattr(transformers, name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", help="files, or file:line (default: kernels, ops and the fused layers)")
    parser.add_argument("--list", action="store_true", help="count the mutants of each file and run none")
    parser.add_argument("--sample", type=int, help="so many, drawn evenly (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--tests", type=int, default=60, help="how many tests a mutant meets at most")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a mutant; one that needs more is noticed")
    parser.add_argument("--lines", type=Path, help="which tests run which lines: read there, or made and kept there")
    parser.add_argument("--out", type=Path, help="write the table there, as JSON")
    args = parser.parse_args()
    every = sorted(str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / "hf_rmsnorm" / room).glob("*.py"))
    places = [place.partition(":") for place in args.places or every]
    chosen = [each for path, _, line in places for each in mutants_of(path) if not line or each[0].line == int(line)]
    if args.list:
        for path, _, _ in places:
            print(f"{sum(m.path == path for m, _ in chosen):>5}  {path}")
        print(f"{len(chosen):>5}  in all")
        return 0
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    load_what_all_need()
    if args.lines is not None and args.lines.exists():
        lines = json.loads(args.lines.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            lines = find_lines((args.lines or Path(folder) / "lines.json").resolve())
    results = []
    for result in run(chosen, lines, args.jobs, args.tests, args.timeout):
        results.append(result)
        word = "noticed " if result["noticed"] else "known   " if result["reason"] in KNOWN.values() else "SURVIVED"
        place = f"{result['path']}:{result['line']}"
        print(f"{word} {place}  {result['before'][:60]}  ->  {result['after'][:60]}  {result['by']}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    survivors = [r for r in results if not r["noticed"] and r["reason"] not in KNOWN.values()]
    print(f"{len(results)} mutants, {len(survivors)} survivors without a reason")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
