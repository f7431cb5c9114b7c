"""A patched model in another process, and patches in several threads at once."""

import queue
import sys
import threading
from functools import partial

import pytest
import tiny_models
import torch
import torch.multiprocessing
from processes import python
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend

ids = tiny_models.token_ids()
FAMILIES = ["qwen3", "gpt2"]


# Processes

LOAD = """
import sys, torch
assert "hf_rmsnorm" not in sys.modules
torch.set_num_threads(1)
for family in sys.argv[2:]:
    model = torch.load(f"{sys.argv[1]}/{family}.pt", weights_only=False)
    ids, expected, paths = torch.load(f"{sys.argv[1]}/{family}.expected.pt")
    from hf_rmsnorm import patch_model, unpatch_model, use_backend
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert [record.path for record in patch_model(model, strict=True).swapped] == paths
    assert unpatch_model(model) == len(paths)
    assert torch.equal(model(ids).logits, expected)
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
        facts = ids, expected, tiny_models.fused_norms(model)
        torch.save(facts, tmp_path / f"{family}.expected.pt")
    python("-W", "ignore", "-c", LOAD, tmp_path, *FAMILIES)
    for family, model in models.items():  # and back, unpatched there
        again = torch.load(tmp_path / f"{family}.again.pt", weights_only=False)
        unpatch_model(model)
        assert tiny_models.types(again) == tiny_models.types(model)
        assert torch.equal(again(ids).logits, model(ids).logits)


# Threads


def together(*functions):
    """Run functions in a thread each, started at the same moment; raise what any of
    them raised.
    """
    start = threading.Barrier(len(functions))
    failures = queue.Queue()

    def work(function):
        try:
            start.wait()
            function()
        except BaseException as error:  # handed over to the main thread
            failures.put(error)

    threads = [threading.Thread(target=work, args=(f,)) for f in functions]
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


def test_two_models_of_new_classes_are_recognised_and_patched_at_once(eager_switching):
    class Fresh(LlamaRMSNorm):  # nothing is known of it yet, to either thread
        pass

    models = []
    for _ in range(2):
        models.append(nn.Sequential(Fresh(40), Fresh(40), nn.LayerNorm(40)))
    reports = {}

    def patch(i):
        reports[i] = patch_model(models[i], strict=True)

    together(lambda: patch(0), lambda: patch(1))
    assert reports[0] == reports[1]
    assert len(reports[0].swapped) == 3
    # One formula of one class is one class, whichever came first: dynamo and pickle go
    # by that.
    assert tiny_models.types(models[0]) == tiny_models.types(models[1])
    together(lambda: unpatch_model(models[0]), lambda: unpatch_model(models[1]))
    assert not any(tiny_models.fused_norms(model) for model in models)


def test_threads_in_one_model_do_not_meet(eager_switching):
    model = tiny_models.build("qwen3")
    inputs = [ids, ids.flip(1), ids.roll(3, 1)]
    expected = [model(tokens).logits for tokens in inputs]
    patch_model(model)

    def run(tokens, logits):
        with torch.no_grad(), use_backend("reference"):
            for _ in range(5):
                assert torch.equal(model(tokens).logits, logits)

    together(*map(partial, [run] * 3, inputs, expected))
