"""Which tests run which lines of the package."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

from .changes import ROOT, Mutant
from .forks import fork

ROOMS = ("kernels", "ops", "fused")
TESTS = ("tests/unit/kernels", "tests/unit/ops", "tests/unit/fused", "tests/promises/fusion",
         "tests/promises/training/test_memory_efficient.py", "tests/promises/training/test_written_inputs.py",
         "tests/promises/training/test_autocast.py", "tests/promises/state/test_changes.py",
         "tests/promises/bad_inputs/test_bad_tensors.py", "tests/promises/generation/test_counts.py",
         "tests/unit/patching/layers", "tests/unit/patching/formula/test_families.py")  # fmt: skip
# What runs a file in processes of its own, where no line is seen.
ELSEWHERE = {
    "hf_rmsnorm/ops/gradients.py": ("tests/promises/parallel/test_dtensor.py",),
    "hf_rmsnorm/ops/loading.py": ("tests/promises/parallel/test_dtensor.py",),
    "hf_rmsnorm/ops/sharding.py": ("tests/promises/parallel/test_dtensor.py",),
    "hf_rmsnorm/kernels/compiled.py": ("tests/unit/kernels/test_launch.py",),
}


class Lines:
    """A pytest plugin that notes which lines of the package each test runs, and for how long."""

    CALLS = 50  # of a function in a test: an interpreted kernel calls some by the thousand

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, list[str]] = defaultdict(list)  # "file:line" -> tests
        self._paths: dict = {}

    def pytest_runtest_protocol(self, item):
        self.seen: set[tuple] = set()
        self.calls: dict = defaultdict(int)
        self.began = time.process_time()
        sys.settrace(self._trace)

    def pytest_runtest_logfinish(self, nodeid):
        sys.settrace(None)
        self.seconds[nodeid] = time.process_time() - self.began
        for path, line in self.seen:
            self.tests[f"{path}:{line}"].append(nodeid)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if code not in self._paths:
            _, _, inside = code.co_filename.partition("/hf_rmsnorm/")
            self._paths[code] = f"hf_rmsnorm/{inside}" if inside.split("/")[0] in ROOMS else None
        path = self._paths[code]
        if path is None or self.calls[code] > self.CALLS:
            return None
        self.calls[code] += 1
        seen = self.seen

        def local(frame, event, _):
            if event == "line":
                seen.add((path, frame.f_lineno))
            return local

        seen.add((path, frame.f_lineno))
        return local


def find_lines(target: Path, full: bool, jobs: int) -> dict:
    """Run every test once, in processes of their own, and read what they noted."""
    found = ([ROOT / place] if place.endswith(".py") else (ROOT / place).glob("test_*.py") for place in TESTS)
    files = sorted(str(file.relative_to(ROOT)) for each in found for file in each)

    def work(share: list[str], part: Path) -> int:
        import pytest

        plugin = Lines()
        which = "not nightly" if full else "not full and not nightly"
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", which, *share], plugins=[plugin])
        part.write_text(json.dumps({"seconds": plugin.seconds, "tests": plugin.tests}), encoding="utf-8")
        return 0

    os.chdir(ROOT)
    parts = [target.with_suffix(f".{i}") for i in range(jobs)]
    for pid in [fork(lambda i=i, part=part: work(files[i::jobs], part)) for i, part in enumerate(parts)]:
        os.waitpid(pid, 0)
    whole: dict = {"seconds": {}, "tests": defaultdict(list)}
    for part in parts:
        found = json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
        whole["seconds"] |= found["seconds"]
        for place, tests in found["tests"].items():
            whole["tests"][place] += tests
    target.write_text(json.dumps(whole), encoding="utf-8")
    return whole


def covering(mutant: Mutant, lines: dict, most: int) -> list[str]:
    """The tests that run a mutant's line: those of its file first, of these the quickest, one of each function first.

    Where none does, as of a line that runs when its file is imported, those that run any line of the file.
    """
    own = "tests/unit/" + mutant.path.removeprefix("hf_rmsnorm/").replace("/", "/test_")
    found = lines["tests"].get(f"{mutant.path}:{mutant.line}", ())
    found = found or {t for at, tests in lines["tests"].items() if at.startswith(f"{mutant.path}:") for t in tests}
    tests = sorted(found, key=lambda t: (lines["seconds"][t], t))
    seen: dict[str, int] = defaultdict(int)
    order = []
    for test in tests:  # one of each test function, then the second of each, and so on
        name = test.split("[")[0]
        order.append((not test.startswith(own), seen[name], lines["seconds"][test], test))
        seen[name] += 1
    return [test for *_, test in sorted(order)][:most] + [*ELSEWHERE.get(mutant.path, ())]
