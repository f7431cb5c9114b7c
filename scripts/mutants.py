"""Break the code on purpose and see that a test notices: ``python -m scripts.mutants [options]``.

Each mutant is the package with one change: a guard's condition negated, a comparison turned, a part of a key dropped, a
constant off by one. The tests of that file run on it, the quickest first, until one fails. What no test notices is a
survivor, and is printed with its place; ``--out`` keeps the table.

    python -m scripts.mutants --list                          how many mutants each file has
    python -m scripts.mutants --sample 300 --jobs 2           so many, drawn evenly
    python -m scripts.mutants hf_rmsnorm/kernels/plan.py      all of a file
    python -m scripts.mutants hf_rmsnorm/ops/backend.py:81    those of a line
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the tests of a room are, the quickest to notice first; `fused` and `ops` are also tested by what users do.
TESTS = {
    "kernels": ("tests/unit/kernels", "tests/unit/ops"),
    "ops": ("tests/unit/ops", "tests/unit/kernels", "tests/promises/training/test_memory_efficient.py",
            "tests/promises/bad_inputs", "tests/promises/fusion"),
    "fused": ("tests/unit/fused", "tests/promises/fusion", "tests/promises/training/test_written_inputs.py",
              "tests/promises/training/test_memory_efficient.py", "tests/promises/state"),
}  # fmt: skip
KEYS = ("key", "like", "dtypes", "strides", "table", "versions")  # names that a tuple of what a thing depends on has
TURNED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
          ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    before: str
    after: str
    number: int  # among those of its file

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before}  ->  {self.after}"


def changes(tree: ast.Module):
    """(node, what stands in its place) of each mutant, in the order of the source."""
    texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings, and `...`
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.BoolOp):
            for at in range(len(node.values)):
                rest = node.values[:at] + node.values[at + 1 :]
                yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and id(node) not in texts:
            yield node, ast.Constant(node.value + 1 if type(node.value) is int else node.value * 2)
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(node.value, ast.Tuple):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in KEYS:
                for at in range(len(node.value.elts)):
                    rest = node.value.elts[:at] + node.value.elts[at + 1 :]
                    yield node.value, ast.Tuple(rest, ast.Load())


def mutants_of(path: str) -> list[tuple[Mutant, str]]:
    """Every mutant of a file, with its source. Statements that only type checkers run are left alone."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole, found = source.encode(), []
    for number, (node, instead) in enumerate(changes(tree)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(instead)))})"
        text = (whole[:first] + after.encode() + whole[last:]).decode()
        before = " ".join(whole[first:last].decode().split())
        found.append((Mutant(path, node.lineno, before[:80], after[:80], number), text))
    return found


def every_file() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for room in TESTS for p in (ROOT / "hf_rmsnorm" / room).glob("*.py"))


def run(mutant: Mutant, text: str, timeout: float) -> dict:
    """Whether the tests of its room notice a mutant, and by which."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        shutil.copytree(ROOT / "hf_rmsnorm", copied / "hf_rmsnorm", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copied)
        for name in ("benchmarks", "scripts", "examples", "docs", "README.md"):
            (copied / name).symlink_to(ROOT / name)
        (copied / mutant.path).write_text(text, encoding="utf-8")
        room = Path(mutant.path).parts[1]
        quiet = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
        command = [sys.executable, "-m", "pytest", *quiet, f"--rootdir={folder}", *TESTS[room]]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return asdict(mutant) | {"noticed": True, "by": "it does not end"}
        by = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        return asdict(mutant) | {"noticed": done.returncode != 0, "by": by.removeprefix("FAILED ").split(" - ")[0]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", help="files, or file:line (default: kernels, ops and the fused layers)")
    parser.add_argument("--list", action="store_true", help="count the mutants of each file and run none")
    parser.add_argument("--sample", type=int, help="so many, drawn evenly (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tests at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the tests of one mutant")
    parser.add_argument("--out", type=Path, help="write the table there, as JSON")
    args = parser.parse_args()
    places = [place.partition(":") for place in args.places or every_file()]
    chosen = [
        (mutant, text) for path, _, line in places for mutant, text in mutants_of(path)
        if not line or mutant.line == int(line)
    ]  # fmt: skip
    if args.list:
        for path, _, _ in places:
            print(f"{sum(m.path == path for m, _ in chosen):>5}  {path}")
        print(f"{len(chosen):>5}  in all")
        return 0
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    results, survivors = [], 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda each: run(*each, args.timeout), chosen):
            results.append(result)
            survivors += not result["noticed"]
            word = "noticed " if result["noticed"] else "SURVIVED"
            place = f"{result['path']}:{result['line']}"
            print(f"{word} {place}  {result['before']}  ->  {result['after']}  {result['by']}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results)} mutants, {survivors} survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
