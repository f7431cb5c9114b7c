"""The measuring sections of gpu_check.py, which explains them."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks import host, models, training
from benchmarks.kernels import time_case
from benchmarks.peers import OURS, ROTARY, Case, other_libraries
from benchmarks.shapes import SHAPES, TINY
from benchmarks.timing import Stopwatch, copy_bandwidth

CASES = (  # the most important first: the last ones are skipped when time runs out
    Case("RMSNorm", (8192, 4096), compiled=True),
    Case("add + RMSNorm", (8192, 4096), compiled=True),
    Case("q/k norm", (2, 4096, 32, 8, 128), compiled=True),
    Case("q/k norm + rotary", (2, 4096, 32, 8, 128), compiled=True),
    Case(ROTARY, (2, 4096, 32, 8, 128), compiled=True),
    Case("LayerNorm", (8192, 1024), compiled=True),
    Case("RMSNorm", (2048, 4096)),
    Case("RMSNorm", (1, 4096), compiled=True),
    Case("RMSNorm", (16384, 5120)),
    Case("RMSNorm", (1, 8192, 32, 128)),
    Case("LayerNorm", (8192, 4096)),
    Case("RMSNorm", (4096, 8192)),
    Case("RMSNorm", (8192, 896)),
    Case("RMSNorm", (256, 4096)),
    Case("RMSNorm", (2048, 14336)),
    Case("RMSNorm", (2048, 16384)),
    Case("LayerNorm", (4096, 8192)),
    Case("q/k norm", (1, 1, 32, 8, 128)),
    Case("LayerNorm", (2048, 16384)),
)
DRY_CASES = (
    Case("RMSNorm", (6, 64), compiled=True),
    Case("add + RMSNorm", (6, 64)),
    Case("q/k norm", (2, 3, 4, 2, 32)),
    Case("q/k norm + rotary", (2, 3, 4, 2, 32)),
    Case(ROTARY, (2, 3, 4, 2, 32)),
    Case("LayerNorm", (6, 64)),
)
# sections and the shapes they take eight layers of
MODELS = {"llama": "Llama-3.1-8B", "qwen3": "Qwen3-8B"}
DRY_SIZES = {"prompt": 4, "new_tokens": 3, "prefill": 6}
DRY_SIZES |= {"batch": 2, "length": 5, "rounds": 1}


def run(name: str, section) -> None:
    """Fill the section of that name, saving as it goes."""
    if name == "kernels":
        run_kernels(section)
    elif name == "host":
        run_host(section)
    elif name == "train":
        section.failures += training.run(
            section.device, section.data, section.dry_run,
            left=section.left, save=section.save,
        )  # fmt: skip
    else:
        run_model(name, section)


def run_kernels(section) -> None:
    watch, dtype = Stopwatch(section.device), torch.bfloat16
    libraries, section.data["peers"] = other_libraries()
    section.data["copy_gb_per_s"] = bandwidth = copy_bandwidth(watch)
    section.save()
    section.data["cases"], section.data["skipped"] = [], []
    last = 0.0  # seconds
    for case in DRY_CASES if section.dry_run else CASES:
        if section.left() < 1.5 * last:
            section.data["skipped"].append(str(case))
            continue
        start = time.perf_counter()
        result = time_case(case, watch, dtype, libraries, bandwidth.get("best"))
        last = time.perf_counter() - start
        section.data["cases"].append(result)
        ours = result["implementations"][OURS]
        section.failures += [
            f"{case}: {failure}" for failure in ours["gate"]["failures"]
        ]
        if "error" in ours:
            section.failures.append(f"{case}: {ours['error']}")
        section.save()


def run_host(section) -> None:
    rounds = 2 if section.dry_run else None
    section.data |= host.run(section.device, torch.bfloat16, rounds)
    for case, entries in section.data["cases"].items():
        if "error" in entries[OURS]:
            section.failures.append(f"{case}: {entries[OURS]['error']}")


def run_model(name: str, section) -> None:
    shape, sizes, layers = SHAPES[MODELS[name]], models.SIZES, models.LAYERS
    if section.dry_run:
        shape, sizes, layers = replace(TINY["tiny"], model_type=name), DRY_SIZES, 2
    work = models.Workload(shape, sizes, layers, section.device)
    section.failures += models.run_phases(
        work, name, section.data, left=section.left, save=section.save
    )
