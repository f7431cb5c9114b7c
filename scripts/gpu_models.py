"""End to end on random models of real layers' shape: the sections "llama" and "qwen3" of gpu_check.py."""

from __future__ import annotations

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_rmsnorm

OURS = "patch_model"
SHAPES = {  # eight layers of Llama-3.1-8B and of Qwen3-8B
    "llama": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
}  # fmt: skip
DRY_SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
SIZES = {"prompt": 128, "new_tokens": 128, "prefill": 8192, "batch": 2, "length": 2048, "rounds": 5}
DRY_SIZES = {"prompt": 4, "new_tokens": 3, "prefill": 6, "batch": 2, "length": 5, "rounds": 1}


def random_model(name: str, shape: dict, device: str) -> torch.nn.Module:
    """A bf16 model of the shape; its norm weights are random too, so that a norm that ignores them is seen."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in path:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None  # every run generates the same number of tokens
    return model


class Workload:
    """Three things to do with the model; each returns what it measured, and what its result was."""

    def __init__(self, name: str, section):
        self.cuda = section.device == "cuda"
        self.sizes = DRY_SIZES if section.dry_run else SIZES
        shape = DRY_SHAPE if section.dry_run else SHAPES[name]
        self.model = random_model(name, shape, section.device)
        vocabulary = shape["vocab_size"]

        def ids(*size):
            return torch.randint(vocabulary, size, device=section.device)

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
    """The result of a variant beside that of the unpatched model. Informative only: the logits of a random model are
    nearly flat, so one rounding may change a token. Equality on trained models is what the GPU tests demand."""
    if phase == "decode":
        differ = [i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
        return {"tokens_equal": not differ, "first_difference": differ[0] if differ else None}
    if phase == "prefill":
        same_top = bool(expected.argmax() == got.argmax())
        return {"max_abs_dlogit": (expected - got).abs().max().item(), "top1_equal": same_top}
    return {"loss": got, "abs_dloss": abs(expected - got)}


def apply_liger(name: str, model) -> str | None:
    """Swap the model's norms, and nothing else, for Liger's; returns why not, or None. It cannot be undone."""
    try:
        from liger_kernel import transformers as liger

        function = getattr(liger, f"apply_liger_kernel_to_{name}")
        function(
            rope=False, cross_entropy=False, fused_linear_cross_entropy=False, swiglu=False, rms_norm=True, model=model
        )
    except Exception as error:  # a peer may be missing or fail in any way it likes; which way is in the result
        return f"{type(error).__name__}: {error}"[:200]
    return None


def run_model(name: str, section) -> None:
    """Unpatched and patched in turn, round by round, then Liger; saves after every phase."""
    work = Workload(name, section)
    model, data = work.model, section.data
    data["sizes"], data["dtype"] = work.sizes, "bfloat16"
    data["parameters"] = sum(p.numel() for p in model.parameters())
    phases = data["phases"] = {"decode": {}, "prefill": {}, "train": {}}
    data["skipped"] = []
    results = {}

    def measure(phase: str, variant: str, rounds: int, switch=lambda variant: None):
        """Warm up, then the rounds; `switch` makes the model the variant, or the one it is compared with."""
        names = [variant] if variant == "liger" else ["unpatched", variant]
        if section.left() < 20:
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
            entry = phases[phase][n] = {**medians, "samples": samples[n]}
            if n != "unpatched" and (phase, "unpatched") in results:
                entry |= compare(phase, results[phase, "unpatched"], results[phase, n])
                before = phases[phase]["unpatched"]
                faster = "tokens_per_s" in medians
                ratio = medians["tokens_per_s"] / before["tokens_per_s"] if faster else before["ms"] / medians["ms"]
                entry["speedup"] = ratio
                if "peak_gb" in medians:
                    entry["memory_ratio"] = medians["peak_gb"] / before["peak_gb"]
        section.save()

    def toggle(variant: str):
        if variant == OURS:
            report = hf_rmsnorm.patch_model(model)
            data["norms_swapped"] = len(report.swapped)
            data["formulas"] = sorted({str(record.formula) for record in report.swapped})
        else:
            hf_rmsnorm.unpatch_model(model)

    for phase in phases:
        measure(phase, OURS, work.sizes["rounds"], toggle)
    hf_rmsnorm.unpatch_model(model)
    if not data.get("norms_swapped") and not data["skipped"]:
        section.failures.append("patch_model swapped no norm")
    data["liger"] = apply_liger(name, model) or "norms swapped"
    if data["liger"] == "norms swapped":
        for phase in phases:
            try:
                measure(phase, "liger", work.sizes["rounds"])
            except Exception as error:
                phases[phase]["liger"] = {"error": f"{type(error).__name__}: {error}"[:300]}
                section.save()
