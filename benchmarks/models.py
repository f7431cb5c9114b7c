"""End to end on random models of real layers' shape: decode, prefill and a training
step of the unpatched and the patched model, with Liger, and with both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.counting import build
from benchmarks.shapes import ModelShape
from benchmarks.speed import UNPATCHED, times_as_fast
from benchmarks.variants import (
    BOTH,
    LIGER,
    OURS,
    Variant,
    in_words,
    timed_variants,
)

LAYERS = 8
LEAST_S = 30  # seconds that a phase takes on an H100
SIZES = {"prompt": 128, "new_tokens": 128, "prefill": 8192}
SIZES |= {"batch": 2, "length": 2048, "rounds": 5}


def random_model(shape: ModelShape, layers: int, device: str) -> torch.nn.Module:
    """A model of the shape; its norm weights are random too, so that a norm that
    ignores them is seen.
    """
    torch.manual_seed(0)
    model = build(shape, layers, device)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in path:
                parameter.uniform_(0.5, 1.5).sub_(shape.weight_offset)
    # every run generates the same number of tokens
    model.generation_config.eos_token_id = None
    return model


class Workload:
    """Three tasks for the model; each returns its measurement."""

    def __init__(self, shape: ModelShape, sizes: dict, layers: int, device: str):
        self.cuda, self.sizes = device == "cuda", sizes
        self.model = random_model(shape, layers, device)

        def ids(*size):
            return torch.randint(shape.vocabulary, size, device=device)

        self.prompt = ids(1, sizes["prompt"])
        self.long = ids(1, sizes["prefill"])
        self.batch = ids(sizes["batch"], sizes["length"])

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def decode(self) -> dict:
        """Batch 1, greedy: tokens per second."""
        self.model.eval()
        new = self.sizes["new_tokens"]
        how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(self.prompt)
        seconds = self._seconds(lambda: self.model.generate(self.prompt, **how))
        return {"tokens_per_s": new / seconds}

    @torch.no_grad()
    def prefill(self) -> dict:
        """One long prompt, without gradients: milliseconds."""
        self.model.eval()
        how = {"use_cache": True, "logits_to_keep": 1}
        return {"ms": 1e3 * self._seconds(lambda: self.model(self.long, **how))}

    def train(self) -> dict:
        """Forward and backward of one batch: milliseconds and peak memory."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

        def step():
            self.model(self.batch, labels=self.batch, use_cache=False).loss.backward()

        measured = {"ms": 1e3 * self._seconds(step)}
        if self.cuda:
            measured["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        self.model.zero_grad(set_to_none=True)
        return measured

    def _seconds(self, work: Callable[[], object]) -> float:
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start


def measure(work: Workload, variants: dict[str, Variant], phase: str) -> dict:
    """By variant medians and samples of a phase, or its error.

    A warm-up comes first. In each round all variants take their turn; "unpatched" is
    the first of them.
    """
    failed: dict = {}
    samples: dict[str, list[dict]] = {name: [] for name in variants}
    for turn in range(work.sizes["rounds"] + 1):
        for name in list(samples):
            try:
                with variants[name].of(work.model):
                    measured = getattr(work, phase)()
            except Exception as error:
                if variants[name].liger is None:
                    raise
                failed[name] = {"error": in_words(error)}
                del samples[name]
                continue
            if turn > 0:
                samples[name].append(measured)
    entries = {}
    for name, taken in samples.items():
        entries[name] = {"samples": taken}
        for key in taken[0]:
            entries[name][key] = statistics.median(sample[key] for sample in taken)
        if name != UNPATCHED:
            entries[name] |= ratios(entries[name], entries[UNPATCHED])
    return entries | failed


def ratios(entry: dict, unpatched: dict) -> dict:
    """Of medians: how many times as fast, and of which share of the memory."""
    ratios = {"speedup": times_as_fast(entry, unpatched)}
    if "peak_gb" in entry:
        ratios["memory_ratio"] = entry["peak_gb"] / unpatched["peak_gb"]
    return ratios


def run_phases(
    work: Workload,
    name: str,
    data: dict,
    phases: tuple[str, ...] = ("decode", "prefill", "train"),
    left: Callable[[], float] = lambda: math.inf,
    save: Callable[[], None] = lambda: None,
) -> list[str]:
    """Measure each variant of `benchmarks.variants`, alternating by round.

    Args:
        name: the model type, by which Liger knows its patch.
        data: filled with ``phases`` (by phase and variant: medians, samples,
            ``speedup``), ``skipped``, ``liger`` (what of it, or why not), and the norms
            that were patched.
        left: seconds that are left; below `LEAST_S` a phase is skipped, and named.
        save: called after each phase.

    Returns:
        What failed of this package, in words.
    """
    variants, liger = timed_variants(name)
    with variants[OURS].of(work.model) as report:
        data["norms_swapped"] = len(report.swapped)
    data |= {"sizes": work.sizes, "skipped": [], "liger": liger}
    data["layers"] = work.model.config.num_hidden_layers
    data["phases"] = {phase: {} for phase in phases}
    failures = []
    if not data["norms_swapped"]:
        failures.append("patch_model swapped no norm")
    for phase in phases:
        if left() < LEAST_S:
            data["skipped"].append(phase)
            continue
        data["phases"][phase] = measure(work, variants, phase)
        failures += broken_together(phase, data["phases"][phase])
        save()
    return failures


def broken_together(where: str, entries: dict) -> list[str]:
    """That Liger ran by itself and failed together with this package."""
    error = entries.get(BOTH, {}).get("error")
    if error is None or "error" in entries.get(LIGER, {}):
        return []
    return [f"{where}, with Liger's MLP and loss: {error}"]
