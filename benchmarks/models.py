"""End to end on random models of real layers' shape: decode, prefill, a training step, before and after the patch."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.counting import build
from benchmarks.shapes import ModelShape
from hf_rmsnorm import patch_model, unpatch_model

BEFORE, AFTER, PEER = "unpatched", "patch_model", "liger"
LAYERS = 8
SIZES = {"prompt": 128, "new_tokens": 128, "prefill": 8192, "batch": 2, "length": 2048, "rounds": 5}


def random_model(shape: ModelShape, layers: int, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of the shape; its norm weights are random too, so that a norm that ignores them is seen."""
    torch.manual_seed(0)
    model = build(shape, layers, device, dtype)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in path:
                parameter.uniform_(0.5, 1.5).sub_(shape.weight_offset)
    model.generation_config.eos_token_id = None  # every run generates the same number of tokens
    return model


class Workload:
    """Three tasks for the model; each returns its measurement and its result."""

    def __init__(self, shape: ModelShape, sizes: dict, layers: int, device: str, dtype: torch.dtype = torch.bfloat16):
        self.cuda, self.sizes = device == "cuda", sizes
        self.model = random_model(shape, layers, device, dtype)

        def ids(*size):
            return torch.randint(shape.vocabulary, size, device=device)

        self.prompt = ids(1, self.sizes["prompt"])
        self.long = ids(1, self.sizes["prefill"])
        self.batch = ids(self.sizes["batch"], self.sizes["length"])

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def decode(self) -> tuple[dict, list[int]]:
        """Batch 1, greedy: tokens per second, and the tokens."""
        self.model.eval()
        new = self.sizes["new_tokens"]
        self.sync()
        start = time.perf_counter()
        tokens = self.model.generate(
            self.prompt, attention_mask=torch.ones_like(self.prompt), max_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        self.sync()
        return {"tokens_per_s": new / (time.perf_counter() - start)}, tokens[0, -new:].tolist()

    def prefill(self) -> tuple[dict, torch.Tensor]:
        """One long prompt, without gradients: milliseconds, and the logits of the last token."""
        self.model.eval()
        self.sync()
        start = time.perf_counter()
        with torch.no_grad():
            logits = self.model(self.long, use_cache=True, logits_to_keep=1).logits
        self.sync()
        return {"ms": (time.perf_counter() - start) * 1e3}, logits[0, -1].float()

    def train(self) -> tuple[dict, float]:
        """Forward and backward of one batch: milliseconds and peak memory, and the loss."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self.sync()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = self.model(self.batch, labels=self.batch, use_cache=False).loss
        loss.backward()
        self.sync()
        measured = {"ms": (time.perf_counter() - start) * 1e3}
        if self.cuda:
            measured["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        self.model.zero_grad(set_to_none=True)
        return measured, loss.item()


def compare(phase: str, expected, got) -> dict:
    """Compare the result of a variant with that of the unpatched model.

    This is informative only: the logits of a random model are nearly flat, so one rounding may change a token. The GPU
    tests demand equality of trained models.
    """
    if phase == "decode":
        differ = [i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
        return {"tokens_equal": not differ, "first_difference": differ[0] if differ else None}
    if phase == "prefill":
        same_top = bool(expected.argmax() == got.argmax())
        return {"max_abs_dlogit": (expected - got).abs().max().item(), "top1_equal": same_top}
    return {"loss": got, "abs_dloss": abs(expected - got)}


@contextmanager
def liger_norms(name: str, model) -> Iterator[str]:
    """The model with its norms, and nothing else, swapped for Liger's, or why not: "norms swapped" or the reason.

    The model keeps them. Liger also exchanges the classes in the model's module, where the next model would find them:
    those are put back at the end.
    """
    space = vars(sys.modules[type(model).__module__])
    before = dict(space)
    try:
        try:
            from liger_kernel import transformers as liger

            function = getattr(liger, f"apply_liger_kernel_to_{name}")
            function(
                rope=False, cross_entropy=False, fused_linear_cross_entropy=False, swiglu=False, rms_norm=True,
                model=model,
            )  # fmt: skip
            said = "norms swapped"
        except Exception as error:  # a peer may be missing or fail in any way it likes; which way is in the result
            said = f"{type(error).__name__}: {error}"[:200]
        yield said
    finally:
        space.update(before)


def run_phases(
    work: Workload,
    name: str,
    data: dict,
    phases: tuple[str, ...] = ("decode", "prefill", "train"),
    left: Callable[[], float] = lambda: math.inf,
    save: Callable[[], None] = lambda: None,
) -> list[str]:
    """Measure unpatched and patched, alternating by round; then Liger, whose patch cannot be undone.

    Args:
        name: the model type, by which Liger knows its patch.
        data: filled with ``phases`` (by phase and variant: medians, samples, ``speedup``), ``skipped``, and the norms
            that were patched.
        left: seconds that are left; below 20 a measurement is skipped, and named.
        save: called after each measurement.

    Returns:
        What failed of this package, in words.
    """
    model = work.model
    data |= {"sizes": work.sizes, "dtype": str(model.dtype).removeprefix("torch."), "skipped": []}
    data["layers"] = model.config.num_hidden_layers
    data["parameters"] = sum(p.numel() for p in model.parameters())
    data["phases"] = {phase: {} for phase in phases}
    results = {}

    def measure(phase: str, variant: str, rounds: int, switch=lambda variant: None):
        """Warm up, then the rounds; `switch` makes the model the variant, or the one it is compared with."""
        names = [variant] if variant == PEER else [BEFORE, variant]
        if left() < 20:
            data["skipped"].append(f"{phase}: {' and '.join(names)}")
            return
        samples = {n: [] for n in names}
        for turn in range(rounds + 1):
            for n in names:
                switch(n)
                measured, result = getattr(work, phase)()
                if turn == 0:
                    results[phase, n] = result
                else:
                    samples[n].append(measured)
        for n in names:
            medians = {k: statistics.median(s[k] for s in samples[n]) for k in samples[n][0]}
            entry = data["phases"][phase][n] = {**medians, "samples": samples[n]}
            if n != BEFORE and (phase, BEFORE) in results:
                entry |= compare(phase, results[phase, BEFORE], results[phase, n])
                before = data["phases"][phase][BEFORE]
                faster = "tokens_per_s" in medians
                ratio = medians["tokens_per_s"] / before["tokens_per_s"] if faster else before["ms"] / medians["ms"]
                entry["speedup"] = ratio
                if "peak_gb" in medians:
                    entry["memory_ratio"] = medians["peak_gb"] / before["peak_gb"]
        save()

    def toggle(variant: str):
        if variant == AFTER:
            report = patch_model(model)
            data["norms_swapped"] = len(report.swapped)
            data["formulas"] = sorted({str(record.formula) for record in report.swapped})
        else:
            unpatch_model(model)

    for phase in phases:
        measure(phase, AFTER, work.sizes["rounds"], toggle)
    unpatch_model(model)
    failures = [] if data.get("norms_swapped") or data["skipped"] else ["patch_model swapped no norm"]
    with liger_norms(name, model) as data["liger"]:
        for phase in phases if data["liger"] == "norms swapped" else ():
            try:
                measure(phase, PEER, work.sizes["rounds"])
            except Exception as error:  # as in `liger_norms`
                data["phases"][phase][PEER] = {"error": f"{type(error).__name__}: {error}"[:300]}
                save()
    return failures


def run(shapes: dict[str, ModelShape], phase: str, sizes: dict, layers: int, device: str, dtype: torch.dtype) -> dict:
    """By name of the shape what `run_phases` gives for one phase, of a model with so many layers."""
    found = {}
    for name, shape in shapes.items():
        work = Workload(shape, sizes, layers, device, dtype)
        run_phases(work, shape.model_type, found.setdefault(name, {}), (phase,))
        del work  # its memory, before the next one's
    return found
