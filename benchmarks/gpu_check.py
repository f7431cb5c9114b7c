"""Everything only a GPU can tell about this package, in one call of under ten minutes.

    python -m benchmarks gpu                # on a machine with a GPU; nothing needs to be installed but the
                                            # dependencies and pytest; no network is used
    python -m benchmarks gpu --dry-run      # every path on the CPU with tiny shapes, in Triton's interpreter
    python -m benchmarks gpu-report FILE    # print the tables of an earlier result

Each section runs in its own process, so that a crash or a hang ends one section and not
the run:

    tests    pytest -m gpu
    kernels  forward, backward and both, for RMSNorm, LayerNorm, add + norm and strided q/k norms, against Hugging Face
             eager, F.rms_norm, torch.compile and, where it is installed, Liger; every implementation is
             first compared with float64 under the tests' tolerance policy, and marked where it fails
    host     what one call on one row costs the host
    llama, qwen3
             batch-1 decode, an 8K-token prefill and a training step of a random 8-layer model, by turns unpatched,
             patched, with all of Liger's kernels, and patched with Liger's MLP and loss
    train    the same four, a LLaMA and a Qwen3, trained on this repository's text: speed, memory, the loss of each step

Results go to $OUT/gpu_check.json, else to --out, else to
scripts/results/<device>-<date>.json. They are written after every section. Exit code: 0
if the tests and every gate of this package's own kernels passed (sections skipped for
time are named, and do not count), 1 if not, 2 if the run could not start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import gpu_report
from benchmarks.compact import compact_json
from hf_rmsnorm.cli.common import CliError, Result

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 2
# The share of the budget after which a section must stop; time left over goes to the
# next.
SECTIONS = {"tests": 0.33, "kernels": 0.5, "host": 0.6}
SECTIONS |= {"llama": 0.72, "qwen3": 0.84, "train": 1.0}


class Section:
    """The input of a running section, and the file of its results.

    Attributes:
        device: "cuda", or "cpu" in a dry run.
        data: the section's results, written to disk by `save`.
        failures: what failed of this package; any makes the run fail.
    """

    def __init__(self, path: Path, dry_run: bool, deadline: float):
        self.path, self.dry_run, self.deadline = path, dry_run, deadline
        self.device = "cpu" if dry_run else "cuda"
        self.data: dict = {}
        self.failures: list[str] = []

    def left(self) -> float:
        """Seconds until the section should end."""
        return self.deadline - time.monotonic()

    def save(self) -> None:
        write_json(self.path, {"data": self.data, "failures": self.failures})


def write_json(path: Path, content: dict) -> None:
    """Write through a temporary file, so that a crash leaves either the old content or
    the new.

    Paths are written relative to the checkout or to the installed packages, so that
    they name no machine.
    """
    text = compact_json(content)
    for folder in (ROOT, sysconfig.get_path("purelib")):
        text = text.replace(f"{folder}/", "")
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def run_tests(section: Section) -> None:
    """Run `pytest -m gpu` in a subprocess, and read its report."""
    report = section.path.with_suffix(".xml")
    process = subprocess.Popen(
        _pytest(section, report), cwd=ROOT, env=_environment(section),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(section.left(), 1))
    except subprocess.TimeoutExpired:
        section.failures.append("time ran out before all tests had run")
        process.send_signal(signal.SIGINT)  # it still writes its report
        output, _ = process.communicate()
    outcome = {"counts": {}, "failed": []}
    if report.exists():
        outcome = read_junit(report)
    section.data |= {"tail": output[-6000:], **outcome}
    if process.returncode:
        failed = [test["name"] for test in outcome["failed"]]
        section.failures += failed or [f"pytest: {process.returncode}"]
    elif not outcome["counts"]["passed"]:
        section.failures.append("no GPU test ran")


def _pytest(section: Section, report: Path) -> list[str]:
    # A dry run rehearses the bodies of those that are written for it.
    where = ["tests/gpu"] if section.dry_run else gpu_test_files()
    command = [
        sys.executable, "-m", "pytest", *where, "-m", "gpu", "-q",
        "-p", "no:cacheprovider", "--continue-on-collection-errors",
        f"--junitxml={report}",
    ]  # fmt: skip
    if importlib.util.find_spec("xdist") and not section.dry_run:
        command += ["-n", "4"]  # most of the time is compilation on the host
    return command


def _environment(section: Section) -> dict[str, str]:
    path = filter(None, [str(ROOT), os.getenv("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    environment["TRITON_INTERPRET"] = "1" if section.dry_run else "0"
    if section.dry_run:
        environment["HF_RMSNORM_REHEARSE_GPU_TESTS"] = "1"
    return environment


def gpu_test_files() -> list[str]:
    """The test files with a test for GPUs. No other is collected: one that needs what
    this Transformers lacks would fail a run that has nothing to do with it.
    """
    marked = re.compile(r"\bmark\.gpu\b|\bgpu_tests\b")
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(p) for p in paths if marked.search(p.read_text(encoding="utf-8"))]


def read_junit(path: Path) -> dict:
    """Counts, and failures with the first lines of their messages."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        problem = next((e for e in case if e.tag in ("failure", "error")), None)
        if problem is not None:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            # where it was; of a file that cannot be collected, the exception
            last = (problem.text or "").strip().rpartition("\n")[2]
            message = f"{problem.get('message', '')[:300]}: {last[:300]}"
            failed.append({"name": name, "message": message})
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {"counts": counts, "failed": failed}


def run_section(name: str, section: Section) -> None:
    """Run one section by name in this process."""
    if name == "environment":
        from benchmarks.environment import environment

        section.data |= environment(section.device == "cuda")
        return
    if name == "tests":
        return run_tests(section)
    if name == "host":
        # without a GPU it leaves out the launches of kernels that are compiled
        os.environ["TRITON_INTERPRET"] = "0"
    import torch

    from benchmarks import gpu_bench

    torch.manual_seed(0)
    if section.dry_run:
        torch.set_num_threads(1)
        return gpu_bench.run(name, section)
    # graphs cannot be captured on the default stream
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu_bench.run(name, section)


def child(name: str, section: Section) -> None:
    """Body of a section's process: exceptions become part of its result, and its exit
    code.
    """
    os.setpgrp()  # so that the parent can end it with all it started
    try:
        run_section(name, section)
    except BaseException:
        section.data["error"] = traceback.format_exc()[-4000:]
        section.save()
        sys.exit(1)
    section.save()


def supervise(name: str, folder: Path, dry_run: bool, soft: float, hard: float) -> dict:
    """Run a section in a new process; `soft` and `hard` are when it should end and when
    it is made to.
    """
    path = folder / f"{name}.json"
    started = time.monotonic()
    # "spawn": importing Transformers may look for a GPU, and after that a forked child
    # cannot use it
    arguments = (name, Section(path, dry_run, soft))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=child, args=arguments)
    process.start()
    process.join(max(hard - time.monotonic(), 1))
    timed_out = process.is_alive()
    if timed_out:
        for group in (os.killpg, os.kill):
            # killpg fails if the child had no time to make its group
            with contextlib.suppress(ProcessLookupError):
                group(process.pid, signal.SIGKILL)
        process.join()
    saved = {"data": {}, "failures": []}
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
    status = "failed" if saved["failures"] else "passed"
    seconds = round(time.monotonic() - started, 1)
    result = {"status": status, "seconds": seconds, **saved}
    if timed_out:
        result |= {"status": "error", "reason": "did not end in its time and was ended"}
    elif process.exitcode:
        ended = f"the process ended with code {process.exitcode}"
        error = saved["data"].pop("error", ended)
        reason = error.strip().rpartition("\n")[2]
        result |= {"status": "error", "reason": reason, "traceback": error}
    return result


def result_path(args, environment: dict) -> Path:
    """$OUT first, then --out, then a name made of the device and the date."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "gpu_check.json"
    if args.out:
        return args.out
    device = (environment["device"] or "dry-run").lower()
    device = re.sub(r"[^a-z0-9]+", "-", device).strip("-")
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return ROOT / "scripts/results" / f"{device}-{date}.json"


def add_arguments(parser) -> None:
    add = parser.add_argument
    help = "tiny shapes on the CPU, in Triton's interpreter"
    add("--dry-run", action="store_true", help=help)
    help = "seconds for everything (default %(default)g)"
    add("--budget", type=float, default=560.0, help=help)
    help = f"comma-separated sections: {','.join(SECTIONS)}"
    add("--only", metavar="NAMES", help=help)
    help = "file for the results (the variable OUT, a folder, goes first)"
    add("--out", type=Path, help=help)


def run(args) -> Result:
    """Run the sections one by one, each with the time that is left to it."""
    only = args.only.split(",") if args.only else list(SECTIONS)
    if unknown := ", ".join(name for name in only if name not in SECTIONS):
        known = ", ".join(SECTIONS)
        raise CliError(f"no such section: {unknown}; choose among {known}")
    start = time.monotonic()
    os.environ["TRITON_INTERPRET"] = "1" if args.dry_run else "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = _examined(folder, args.dry_run, start + 60)
        path = result_path(args, environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = {"status": "not run yet", "data": {}, "failures": []}
        result = {
            "format": FORMAT,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "dry_run": args.dry_run,
            "budget_s": args.budget,
            "environment": environment,
            "sections": dict.fromkeys(only, waiting),
        }
        sections = result["sections"]
        for name, share in SECTIONS.items():
            if name not in only:
                continue
            soft = start + share * args.budget
            hard = min(soft + 30, start + args.budget + 15)
            left = soft - time.monotonic()
            if left > 0.05 * args.budget:
                print(f"gpu: {name}, {left:.0f} s", file=sys.stderr, flush=True)
                sections[name] = supervise(name, folder, args.dry_run, soft, hard)
            else:
                late = {"status": "skipped", "reason": "time ran out"}
                sections[name] = waiting | late
            result["seconds"] = round(time.monotonic() - start, 1)
            good = ("passed", "skipped")
            result["passed"] = all(s["status"] in good for s in sections.values())
            write_json(path, result)
    text = f"{gpu_report.report(result)}\n\nresults: {path}"
    return Result(result, text, 0 if result["passed"] else 1)


def _examined(folder: Path, dry_run: bool, deadline: float) -> dict:
    """The environment, which has a GPU unless this is a rehearsal."""
    environment = supervise("environment", folder, dry_run, deadline, deadline)
    found = environment["data"].get("device") or dry_run
    if environment["status"] != "passed" or not found:
        missing = "torch sees no GPU; --dry-run rehearses on the CPU"
        raise CliError(environment.get("reason", missing))
    return environment["data"]
