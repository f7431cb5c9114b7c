"""End to end on random models of real layers' shape: decode, prefill, a training step,
before and after the patch.
"""

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
SIZES = {
    "prompt": 128,
    "new_tokens": 128,
    "prefill": 8192,
    "batch": 2,
    "length": 2048,
    "rounds": 5,
}


def random_model(
    shape: ModelShape, layers: int, device: str, dtype: torch.dtype
) -> torch.nn.Module:
    """A model of the shape; its norm weights are random too, so that a norm that
    ignores them is seen.
    """
    torch.manual_seed(0)
    model = build(shape, layers, device, dtype)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in path:
                parameter.uniform_(0.5, 1.5).sub_(shape.weight_offset)
    # every run generates the same number of tokens
    model.generation_config.eos_token_id = None
    return model


class Workload:
    """Three tasks for the model; each returns its measurement and its result."""

    def __init__(
        self,
        shape: ModelShape,
        sizes: dict,
        layers: int,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
    ):
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
            self.prompt, attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=new, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        self.sync()
        return {"tokens_per_s": new / (time.perf_counter() - start)}, tokens[
            0, -new:
        ].tolist()

    def prefill(self) -> tuple[dict, torch.Tensor]:
        """One long prompt, without gradients: milliseconds, and the logits of the last
        token.
        """
        self.model.eval()
        self.sync()
        start = time.perf_counter()
        with torch.no_grad():
            logits = self.model(self.long, use_cache=True, logits_to_keep=1).logits
        self.sync()
        return {"ms": (time.perf_counter() - start) * 1e3}, logits[0, -1].float()

    def train(self) -> tuple[dict, float]:
        """Forward and backward of one batch: milliseconds and peak memory, and the
        loss.
        """
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

    This is informative only: the logits of a random model are nearly flat, so one
    rounding may change a token. The GPU tests demand equality of trained models.
    """
    if phase == "decode":
        differ = [
            i
            for i, pair in enumerate(zip(expected, got, strict=True))
            if pair[0] != pair[1]
        ]
        return {
            "tokens_equal": not differ,
            "first_difference": differ[0] if differ else None,
        }
    if phase == "prefill":
        same_top = bool(expected.argmax() == got.argmax())
        return {
            "max_abs_dlogit": (expected - got).abs().max().item(),
            "top1_equal": same_top,
        }
    return {"loss": got, "abs_dloss": abs(expected - got)}


@contextmanager
def liger_norms(name: str, model) -> Iterator[str]:
    """The model with its norms, and nothing else, swapped for Liger's, or why not:
    "norms swapped" or the reason.

    The model keeps them. Liger also exchanges the classes in the model's module, where
    the next model would find them: those are put back at the end.
    """
    space = vars(sys.modules[type(model).__module__])
    before = dict(space)
    try:
        try:
            from liger_kernel import transformers as liger

            function = getattr(liger, f"apply_liger_kernel_to_{name}")
            function(
                rope=False, cross_entropy=False, fused_linear_cross_entropy=False,
                swiglu=False, rms_norm=True, model=model,
            )  # fmt: skip
            said = "norms swapped"
        except Exception as error:
            # a peer may be missing or fail in any way it likes; which way is in the
            # result
            said = f"{type(error).__name__}: {error}"[:200]
        yield said
    finally:
        space.update(before)


class Rounds:
    """Measures the variants of one model, and fills ``data`` with medians, samples and
    the norms that were patched.

    Args:
        left: seconds that are left; below 20 a measurement is skipped, and named.
        save: called after each measurement.
    """

    def __init__(
        self,
        work: Workload,
        data: dict,
        left: Callable[[], float],
        save: Callable[[], None],
    ):
        self.work, self.data, self.left, self.save = work, data, left, save
        self.results: dict = {}

    def measure(self, phase: str, variant: str) -> None:
        """Warm up, then the rounds. Ours alternates with the unpatched model; Liger's
        patch cannot be undone.
        """
        names = [variant] if variant == PEER else [BEFORE, variant]
        if self.left() < 20:
            self.data["skipped"].append(f"{phase}: {' and '.join(names)}")
            return
        samples = {name: [] for name in names}
        for turn in range(self.work.sizes["rounds"] + 1):
            for name in names:
                self._switch_to(name)
                measured, result = getattr(self.work, phase)()
                if turn == 0:
                    self.results[phase, name] = result
                else:
                    samples[name].append(measured)
        for name in names:
            self.data["phases"][phase][name] = self._entry(phase, name, samples[name])
        self.save()

    def _switch_to(self, variant: str) -> None:
        model = self.work.model
        if variant == BEFORE:
            unpatch_model(model)
        if variant == AFTER:
            report = patch_model(model)
            self.data["norms_swapped"] = len(report.swapped)
            self.data["formulas"] = sorted(
                {str(record.formula) for record in report.swapped}
            )

    def _entry(self, phase: str, variant: str, samples: list[dict]) -> dict:
        """Medians and samples; where the unpatched model was measured, also ratios to
        it and its result compared.
        """
        medians = {
            key: statistics.median(sample[key] for sample in samples)
            for key in samples[0]
        }
        entry = {**medians, "samples": samples}
        if variant == BEFORE or (phase, BEFORE) not in self.results:
            return entry
        entry |= compare(
            phase, self.results[phase, BEFORE], self.results[phase, variant]
        )
        before = self.data["phases"][phase][BEFORE]
        if "tokens_per_s" in medians:
            entry["speedup"] = medians["tokens_per_s"] / before["tokens_per_s"]
        else:
            entry["speedup"] = before["ms"] / medians["ms"]
        if "peak_gb" in medians:
            entry["memory_ratio"] = medians["peak_gb"] / before["peak_gb"]
        return entry


def run_phases(
    work: Workload,
    name: str,
    data: dict,
    phases: tuple[str, ...] = ("decode", "prefill", "train"),
    left: Callable[[], float] = lambda: math.inf,
    save: Callable[[], None] = lambda: None,
) -> list[str]:
    """Measure unpatched and patched, alternating by round; then Liger.

    Args:
        name: the model type, by which Liger knows its patch.
        data: filled with ``phases`` (by phase and variant: medians, samples,
            ``speedup``), ``skipped``, and the norms that were patched.
        left, save: as in `Rounds`.

    Returns:
        What failed of this package, in words.
    """
    model = work.model
    data |= {
        "sizes": work.sizes,
        "dtype": str(model.dtype).removeprefix("torch."),
        "skipped": [],
    }
    data["layers"] = model.config.num_hidden_layers
    data["parameters"] = sum(p.numel() for p in model.parameters())
    data["phases"] = {phase: {} for phase in phases}
    rounds = Rounds(work, data, left, save)
    for phase in phases:
        rounds.measure(phase, AFTER)
    unpatch_model(model)
    failures = (
        []
        if data.get("norms_swapped") or data["skipped"]
        else ["patch_model swapped no norm"]
    )
    with liger_norms(name, model) as data["liger"]:
        for phase in phases if data["liger"] == "norms swapped" else ():
            try:
                rounds.measure(phase, PEER)
            except Exception as error:  # as in `liger_norms`
                data["phases"][phase][PEER] = {
                    "error": f"{type(error).__name__}: {error}"[:300]
                }
                save()
    return failures


def run(
    shapes: dict[str, ModelShape],
    phase: str,
    sizes: dict,
    layers: int,
    device: str,
    dtype: torch.dtype,
) -> dict:
    """By name of the shape what `run_phases` gives for one phase, of a model with so
    many layers.
    """
    found = {}
    for name, shape in shapes.items():
        work = Workload(shape, sizes, layers, device, dtype)
        run_phases(work, shape.model_type, found.setdefault(name, {}), (phase,))
        del work  # its memory, before the next one's
    return found
