"""Break the code on purpose and see that a test notices: ``python -m scripts.mutants [options]``.

Each mutant is the package with one change: a guard's condition negated or a part of it dropped, a comparison turned, a
part of a key dropped, a constant off by one. The tests that run its line run on it, the quickest first, until one
fails. Of kernels, what no test notices while Triton interprets them is tested again as they are compiled. What no test
notices is a survivor. One that is known to change no result stands in scripts/mutants/known.json, by its reason.

    python -m scripts.mutants --list                                how many mutants each file has
    python -m scripts.mutants --sample 330 --jobs 2 --out FILE      so many, drawn evenly, and a table of them
    python -m scripts.mutants --again FILE                          the survivors of a table once more, after a change
    python -m scripts.mutants hf_rmsnorm/kernels/plan.py            all of a file
    python -m scripts.mutants hf_rmsnorm/ops/backend.py:81          those of a line

Which tests run which lines is found first, by running them all once; ``--lines FILE`` keeps that for the next time.
Each mutant is tested in a copy of the package, by a process forked from one that has torch and transformers loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from .changes import ROOT, Mutant, known, mutants_of
from .forks import fork
from .lines import ROOMS, covering, find_lines

EXECUTED = ("tests/unit/kernels/", "tests/ptx/")  # by themselves these run what is compiled of the kernels


def start(mutant: Mutant, text: str, tests: list[str], folder: Path, timeout: int, executed: bool = False) -> int:
    """The process id of a run of these tests on a mutant; its exit code is pytest's.

    executed: the tests shall run what is compiled of the kernels, for which Triton is loaded anew.
    """

    def work() -> int:
        for path in ROOT.iterdir():
            if path.name in ("hf_rmsnorm", "tests"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, folder / path.name, ignore=ignored, dirs_exist_ok=True)
            elif path.name not in (".git", ".venv") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        (folder / mutant.path).write_text(text, encoding="utf-8")
        os.chdir(folder)
        sys.path[0] = str(folder)
        os.environ["PYTHONPATH"] = str(folder)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        signal.alarm(timeout)
        arguments = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist",
                     f"--rootdir={folder}", *tests]  # fmt: skip
        if executed:
            del os.environ["TRITON_INTERPRET"]
            os.environ["TRITON_CACHE_DIR"] = str(folder.parent / "compiled")
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
        import pytest

        return int(pytest.main(arguments))

    return fork(work)


def check_unchanged(lines: dict, timeout: int) -> None:
    """Exit where a test of some file fails on the package as it is: it would notice every mutant."""
    tests = sorted(lines["seconds"], key=lines["seconds"].get, reverse=True)
    of_file = {test.partition("::")[0]: test for test in tests}  # the quickest of each
    path = "hf_rmsnorm/formula.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    for executed in (False, True):
        chosen = [t for t in of_file.values() if not executed or t.startswith(EXECUTED)]
        with tempfile.TemporaryDirectory() as folder:
            pid = start(Mutant(path, 1, "", "", ""), text, chosen, Path(folder), timeout, executed)
            if os.waitpid(pid, 0)[1]:
                raise SystemExit((Path(folder) / "output").read_text(errors="replace"))


def judge(mutant: Mutant, code: int, folder: Path) -> dict:
    output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    by = by.removeprefix("FAILED ").split(" - ")[0] or ("it ends otherwise" if code else "")
    reason = "" if code else known().get(mutant.name, "")
    return asdict(mutant) | {"noticed": code != 0, "by": by, "reason": reason}


def run(chosen: list, lines: dict, jobs: int, most: int, timeout: int):
    """The verdict on each mutant, as it comes."""
    waiting, running = [(mutant, text, False) for mutant, text in reversed(chosen)], {}
    with tempfile.TemporaryDirectory() as root:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant, text, executed = waiting.pop()
                tests = covering(mutant, lines, most)
                tests = [test for test in tests if test.startswith(EXECUTED)][:most] if executed else tests
                if not tests:
                    yield judge(mutant, 0, Path(root))
                    continue
                folder = Path(tempfile.mkdtemp(dir=root))
                pid = start(mutant, text, tests, folder, timeout, executed)
                running[pid] = mutant, text, executed, folder
            if running:
                pid, status = os.wait()
                mutant, text, executed, folder = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if not code and not executed and "/kernels/" in mutant.path:
                    waiting.append((mutant, text, True))
                else:
                    yield judge(mutant, code, folder)
                shutil.rmtree(folder, ignore_errors=True)


def load_what_all_need() -> None:
    """Import what every test needs and no mutant changes, so that each forked process has it."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(1)
    import accelerate  # noqa: F401
    import hypothesis  # noqa: F401
    import transformers
    import triton.language  # noqa: F401

    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "T5Model", "Trainer"):
        getattr(transformers, name)


def write(table: list[dict], path: Path) -> None:
    order = sorted(table, key=lambda row: (row["path"], row["line"], row["before"], row["after"]))
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in order) + "\n]\n", encoding="utf-8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", help="files, or file:line (default: kernels, ops and the fused layers)")
    parser.add_argument("--list", action="store_true", help="count the mutants of each file and run none")
    parser.add_argument("--sample", type=int, help="so many, drawn evenly (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--tests", type=int, default=60, help="how many tests a mutant meets at most")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a mutant; one that needs more is noticed")
    parser.add_argument("--full", action="store_true", help="find the lines of the full tests too")
    parser.add_argument("--lines", type=Path, help="which tests run which lines: read there, or made and kept there")
    parser.add_argument("--again", type=Path, help="run the survivors of this table again, and write what they are now")
    parser.add_argument("--out", type=Path, help="write the table there, as JSON, and run none that it has already")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    every = sorted(str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / "hf_rmsnorm" / room).glob("*.py"))
    places = [place.partition(":") for place in args.places or every]
    chosen = [each for path, _, line in places for each in mutants_of(path) if not line or each[0].line == int(line)]
    if args.list:
        for path, _, _ in places:
            print(f"{sum(m.path == path for m, _ in chosen):>5}  {path}")
        print(f"{len(chosen):>5}  in all")
        return 0
    results: list[dict] = []
    if args.again:
        chosen, results = _again(args.again, chosen)
        args.out = args.again
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    if args.out and not args.again and args.out.exists():
        results = json.loads(args.out.read_text(encoding="utf-8"))
        done = {(row["path"], row["line"], row["code"], row["before"], row["after"]) for row in results}
        chosen = [(m, text) for m, text in chosen if (m.path, m.line, m.code, m.before, m.after) not in done]
    load_what_all_need()
    if args.lines is not None and args.lines.exists():
        lines = json.loads(args.lines.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            target = (args.lines or Path(folder) / "lines.json").resolve()
            lines = find_lines(target, args.full, args.jobs)
    check_unchanged(lines, args.timeout)
    for result in run(chosen, lines, args.jobs, args.tests, args.timeout):
        results.append(result)
        word = "noticed " if result["noticed"] else "known   " if result["reason"] else "SURVIVED"
        place = f"{result['path']}:{result['line']}"
        print(f"{word} {place}  {result['before'][:60]}  ->  {result['after'][:60]}  {result['by']}", flush=True)
        if args.out:
            write(results, args.out)
    noticed = sum(row["noticed"] for row in results)
    survivors = sum(not row["noticed"] and not row["reason"] for row in results)
    print(f"{len(results)} mutants, {noticed} noticed, {survivors} survivors without a reason")
    return 1 if survivors else 0


def _again(path: Path, mutants: list) -> tuple[list, list[dict]]:
    """(the survivors of a table as they are in the code now, the rest of the table, at the lines that it has now)."""
    here: dict = defaultdict(list)
    for mutant, text in mutants:
        here[mutant.name].append((mutant, text))
    chosen, rest = [], []
    for row in json.loads(path.read_text(encoding="utf-8")):
        mutant = Mutant(**{name: row[name] for name in Mutant.__dataclass_fields__})
        if not here[mutant.name]:
            print(f"gone     {mutant.name}")
            continue
        now = min(here[mutant.name], key=lambda each: abs(each[0].line - mutant.line))
        here[mutant.name].remove(now)
        if row["noticed"]:
            rest.append(row | {"line": now[0].line})
        else:
            chosen.append(now)
    return chosen, rest


if __name__ == "__main__":
    raise SystemExit(main())
