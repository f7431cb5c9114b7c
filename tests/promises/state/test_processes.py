"""A patched model in another process, and patches in several threads at once."""

import os
import queue
import subprocess
import sys
import threading

import pytest
import tiny_models
import torch
import torch.multiprocessing
from places import PYTHONPATH
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from user_norms import Evenly

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.norm import fused_part

ids = tiny_models.token_ids()
PATHS = [PYTHONPATH, os.environ.get("PYTHONPATH", "")]
FAMILIES = ["qwen3", "gemma2", "gpt2"]


def fused(model):
    return [path for path, module in model.named_modules() if fused_part(type(module)) is not None]


# Processes

LOAD = """
import sys, torch
assert "hf_rmsnorm" not in sys.modules
torch.set_num_threads(1)
for family in sys.argv[2:]:
    model = torch.load(f"{sys.argv[1]}/{family}.pt", weights_only=False)
    ids, expected, paths = torch.load(f"{sys.argv[1]}/{family}.expected.pt")
    from hf_rmsnorm import patch_model, unpatch_model, use_backend
    from hf_rmsnorm.fused import attention as fused_attention, norm as layers, sums
    fused = [path for path, module in model.named_modules() if layers.fused_part(type(module))]
    assert fused == paths, fused
    calls, real = [], (layers.fused_norm, sums.fused_add_norm, fused_attention.fused_qk_norm)
    layers.fused_norm = lambda *args: calls.append(1) or real[0](*args)
    sums.fused_add_norm = lambda *args: calls.append(1) or real[1](*args)
    fused_attention.fused_qk_norm = lambda *args, **how: calls.extend((1, 1)) or real[2](*args, **how)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert len(calls) == len(paths)
    layers.fused_norm, sums.fused_add_norm, fused_attention.fused_qk_norm = real
    assert [record.path for record in patch_model(model, strict=True).swapped] == paths
    assert unpatch_model(model) == len(paths)
    assert torch.equal(model(ids).logits, expected)
    assert not any("_hf_rmsnorm_recipe" in vars(type(module)) for module in model.modules())
    torch.save(model, f"{sys.argv[1]}/{family}.again.pt")
"""


@pytest.mark.full
def test_torch_save_of_whole_models_loads_in_a_new_process(tmp_path):
    models = {}
    for family in FAMILIES:
        model = models[family] = tiny_models.build(family)
        expected = model(ids).logits.detach()
        patch_model(model, strict=True)
        torch.save(model, tmp_path / f"{family}.pt")
        torch.save((ids, expected, fused(model)), tmp_path / f"{family}.expected.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in PATHS if path)}
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path), *FAMILIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for family, model in models.items():  # and back, unpatched there
        again = torch.load(tmp_path / f"{family}.again.pt", weights_only=False)
        unpatch_model(model)
        assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(again(ids).logits, model(ids).logits)


def in_a_spawned_process(model, norms, results):
    """Runs in the child: the models come through pickle, their tensors through shared memory."""
    torch.set_num_threads(1)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), use_backend("reference"):
        answers = [model(ids).logits.numpy(), norms(x).numpy()]
    model.model.norm.weight.data.fill_(3.0)  # shared: the parent sees it
    results.put((answers, fused(model), fused(norms), unpatch_model(model)))


@pytest.mark.full
def test_a_patched_model_as_an_argument_of_a_spawned_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in PATHS if path))
    model, norms = tiny_models.build("qwen3"), nn.Sequential(LlamaRMSNorm(8), Evenly(8))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [model(ids).logits, norms(x)]
    patch_model(model)
    patch_model(norms)
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=in_a_spawned_process, args=(model, norms, results))
    child.start()
    try:
        answers, of_model, of_norms, restored = results.get(timeout=120)
    finally:
        child.join(120)
    assert child.exitcode == 0
    assert all(torch.equal(torch.from_numpy(a), b) for a, b in zip(answers, expected, strict=True))
    assert of_model == fused(model) and len(of_model) == restored == 9
    assert of_norms == fused(norms) == ["0", "1"]
    assert (model.model.norm.weight == 3.0).all()


# Threads


def together(*functions):
    """Run functions in a thread each, started at the same moment; raise what any of them raised."""
    start, failures = threading.Barrier(len(functions)), queue.Queue()

    def work(function):
        try:
            start.wait()
            function()
        except BaseException as error:  # handed over to the main thread
            failures.put(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not failures.empty():
        raise failures.get()


@pytest.fixture
def eager_switching():
    """Switch threads every few microseconds, so that they meet in the middle of things."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("size", [40, 44, 48, 52])
def test_two_models_of_new_classes_are_recognised_and_patched_at_once(size, eager_switching):
    class Fresh(LlamaRMSNorm):  # nothing is known of it yet, to either thread
        pass

    models = [nn.Sequential(*(Fresh(size) for _ in range(4)), nn.LayerNorm(size)) for _ in range(2)]
    reports = {}

    def patch(i):
        reports[i] = patch_model(models[i], strict=True)

    together(lambda: patch(0), lambda: patch(1))
    assert reports[0] == reports[1] and len(reports[0].swapped) == 5
    # One formula of one class is one class, whoever came first: dynamo and pickle go by that.
    assert [type(m) for m in models[0]] == [type(m) for m in models[1]]
    together(lambda: unpatch_model(models[0]), lambda: unpatch_model(models[1]))
    assert not any(fused(model) for model in models)


@pytest.mark.parametrize("running_is_patched", [False, True])
def test_patching_while_another_thread_generates_on_another_model(running_is_patched, eager_switching):
    running, other = tiny_models.build("qwen3"), tiny_models.build("gemma2")
    other_logits = other(ids).logits

    def generate():
        return running.generate(ids[:, :4], max_new_tokens=6, do_sample=False, output_scores=True,
                                return_dict_in_generate=True)  # fmt: skip

    expected = generate()
    if running_is_patched:
        patch_model(running, strict=True)
    done, rounds = threading.Event(), []

    def generating():
        try:
            with use_backend("reference"):
                for _ in range(4):
                    result = generate()
                    assert torch.equal(result.sequences, expected.sequences)
                    assert all(torch.equal(a, b) for a, b in zip(result.scores, expected.scores, strict=True))
        finally:
            done.set()

    def patching():
        while not done.is_set():
            assert len(patch_model(other, strict=True).swapped) == 9
            with use_backend("reference"):
                assert torch.equal(other(ids).logits, other_logits)
            assert unpatch_model(other) == 9
            rounds.append(1)

    together(generating, patching)
    assert rounds and len(fused(running)) == (9 if running_is_patched else 0) and not fused(other)


def test_two_patched_models_run_under_backends_of_their_own_at_once(eager_switching):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [tiny_models.build("qwen3").to(device) for _ in range(2)]
    tokens, expected = ids.to(device), models[0](ids.to(device)).logits
    for model in models:
        patch_model(model)
    counts = {}

    def run(i, backend):
        with count_launches() as launches, use_backend(backend):
            for _ in range(3):
                logits = models[i](tokens).logits
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
                assert backend == "triton" or torch.equal(logits, expected)
        counts[backend] = launches["norm_forward"] + 2 * launches["qk_norm_forward"]

    with count_launches() as launches:
        together(lambda: run(0, "triton"), lambda: run(1, "reference"))
    assert launches["norm_forward"] + 2 * launches["qk_norm_forward"] == 3 * 9 == counts["triton"]
