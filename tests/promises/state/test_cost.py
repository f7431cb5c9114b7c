"""What a patch costs: recognition once per formula, bookkeeping for the rest, no memory for weights that are not there.

Times are CPU times of this thread, best of several, so that other work on the machine does not count.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
import torch
from reports import calls_of
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import hf_rmsnorm
from hf_rmsnorm import count_launches, patch_model, unpatch_model
from hf_rmsnorm.ops import backend

FORMULAS = [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm, T5LayerNorm, CohereLayerNorm, nn.LayerNorm, nn.RMSNorm]


def fresh(cls):
    """A class that nothing is known of yet, computing what cls computes."""
    return type(cls.__name__, (cls,), {})


def seconds(function):
    start = time.thread_time()
    function()
    return time.thread_time() - start


def call_of_a_norm():
    """Seconds that one call of a norm of Hugging Face's takes here and now: some 15e-6, more on a busy machine."""
    norm, x = LlamaRMSNorm(64), torch.zeros(1, 64)
    return min(seconds(lambda: [norm(x) for _ in range(100)]) for _ in range(5)) / 100


def layered(layers, cls, size=64):
    """As many layers as asked, with two norms and some modules that are none."""
    blocks = [nn.ModuleList([cls(size), nn.Linear(8, 8), nn.SiLU(), cls(size), nn.Dropout()]) for _ in range(layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "norm": cls(size)})


@pytest.mark.parametrize("base", [LlamaRMSNorm, nn.LayerNorm])
def test_an_80_layer_model_is_examined_as_often_as_a_2_layer_one(base):
    def examinations(layers):
        class Spied(base):
            def forward(self, x):
                return super().forward(x)

        model = layered(layers, Spied)
        with calls_of(Spied.forward) as calls:
            assert len(patch_model(model, strict=True).swapped) == 2 * layers + 1
        return len(calls)

    assert examinations(80) == examinations(2) > 0


@pytest.mark.parametrize("base", [LlamaRMSNorm, nn.LayerNorm])
def test_an_80_layer_model_takes_little_longer_than_a_2_layer_one(base):
    cold = {2: [], 80: []}
    bookkeeping = []
    for _ in range(5):
        for layers, times in cold.items():
            model = layered(layers, fresh(base))
            times.append(seconds(lambda model=model: patch_model(model)))
            unpatch_model(model)
            if layers == 80:  # everything is known by now
                bookkeeping.append(seconds(lambda model=model: patch_model(model)))
    two, eighty, known = min(cold[2]), min(cold[80]), min(bookkeeping)
    assert eighty <= 1.5 * two + 1.5 * known, f"2 layers {two:.4f} s, 80 layers {eighty:.4f} s, known {known:.4f} s"
    assert known <= 161 * max(1e-3, 60 * call_of_a_norm()), f"{known:.4f} s of bookkeeping for 161 norms"


@pytest.mark.parametrize("size", [64, 4096])
@pytest.mark.parametrize("base", FORMULAS)
def test_a_formula_is_recognised_in_less_than_50_milliseconds(base, size):
    best = min(seconds(lambda: patch_model(fresh(base)(size), strict=True)) for _ in range(5))
    assert best < max(0.05, 3_000 * call_of_a_norm()), f"{1e3 * best:.1f} ms"


LARGE = """
import resource, sys, time, torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
import hf_rmsnorm, hf_rmsnorm.patching
sizes = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
             num_key_value_heads=8, vocab_size=128256)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.bfloat16)
assert sum(p.numel() for p in model.parameters()) > 70e9
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
report = hf_rmsnorm.patch_model(model, strict=True)
elapsed = time.perf_counter() - start
assert len(report.swapped) == 161 and all(p.is_meta for p in model.parameters())
assert hf_rmsnorm.unpatch_model(model) == 161
unit = 2**20 if sys.platform == "darwin" else 2**10
print(elapsed, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say what a process's peak memory was")
def test_a_70b_model_on_meta_takes_seconds_and_no_memory():
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_rmsnorm.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    elapsed, mebibytes = map(float, done.stdout.split())
    # 0.05 s and 15 MiB where this was written. The promise is 10 s and 1 GB, but memory does not vary as time does.
    assert elapsed < 10 and mebibytes < 200, f"{elapsed} s, {mebibytes} MiB"


@pytest.mark.full
def test_nothing_is_allocated_for_the_model_but_small_inputs():
    """The same in this process: what a probe allocates depends on the hidden size, not on the number of layers."""
    peaks = []
    for layers in (1, 40):
        model = layered(layers, fresh(LlamaRMSNorm), 1024).to("meta")
        with torch.profiler.profile(profile_memory=True) as profile:
            patch_model(model)
        peaks.append(sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0))
    assert peaks[0] == peaks[1] > 0


def functions_called(model, ids):
    """How many Python functions a forward calls."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call"

    with torch.no_grad():
        model(ids)
        sys.setprofile(profile)
        try:
            model(ids)
        finally:
            sys.setprofile(None)
    return count


def test_where_no_kernel_serves_a_patched_module_goes_to_its_own_forward_at_once(monkeypatch):
    model, ids = tiny_models.build("qwen3").eval(), torch.tensor([[5]])
    before = functions_called(model, ids)
    monkeypatch.setattr(backend, "_device_refusal", lambda *_: "no kernel serves this device")
    report = patch_model(model)
    fused = sum(bool(layer.fused) for layer in report.layers)
    # Its forward, whether a kernel may serve, the stand-in above, and two of torch's that say whether it compiles.
    more = 5 * len(report.swapped) + 6 * fused + 2
    assert fused and before < functions_called(model, ids) <= before + more


def test_a_model_is_fused_from_where_a_kernel_serves_it(monkeypatch):
    model, ids = tiny_models.build("qwen3").eval(), torch.tensor([[5, 6, 7]])
    patch_model(model)

    def launches():
        with torch.no_grad(), count_launches() as counts:
            model(ids)
        return sum(counts.values())

    served = launches()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_device_refusal", lambda *_: "no kernel serves this device")
        assert launches() == 0
    assert launches() == served > 0
