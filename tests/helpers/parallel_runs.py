"""Two gloo processes on the CPU, and a training step in them: what the tests of
parallel training share.
"""

import contextlib
import os
import re
from collections import Counter

import tiny_models
import torch
import torch.distributed as dist
import torch.multiprocessing
from places import PYTHONPATH
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_rmsnorm import count_launches, is_patched, use_backend

RANKS = 2
NORMS = 9  # of a tiny Qwen3


def run_ranks(work, tmp_path, monkeypatch, *args):
    """Call ``work(rank, *args)`` in each of two processes of one gloo group; raise what
    any of them raised.
    """
    # gloo is for the CPU, where only the interpreter runs the kernels
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # accelerate and DeepSpeed ask for them
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    # Forked, they have everything imported; a process that has used a GPU cannot be
    # forked.
    method = "fork"
    if torch.accelerator.is_available():
        method = "spawn"
    torch.multiprocessing.start_processes(
        _rank, (tmp_path / "store", work, args), RANKS, start_method=method
    )


def _rank(rank, store, work, args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    how = {"init_method": f"file://{store}", "rank": rank, "world_size": RANKS}
    dist.init_process_group("gloo", **how)
    work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def batch(rank=None):
    """(4, 6) token ids, or the two rows of one rank."""
    ids = tiny_models.token_ids(4, 6)
    if rank is None:
        return ids
    return ids[2 * rank : 2 * rank + 2]


def exact_gradients(model):
    """The whole batch's, in float64, by the names of the trained parameters."""
    model = model.double()
    model(input_ids=batch(), labels=batch()).loss.backward()
    return tiny_models.gradients(model)


WRAPPERS = r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|^module\."


def gradients(model):
    """Whole gradients by the model's own names of the trained parameters, however the
    model is wrapped.
    """
    whole = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    grads = {}
    with whole:
        for name, grad in tiny_models.gradients(model).items():
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            grads[re.sub(WRAPPERS, "", name)] = grad
    return grads


def rms_of(tensors):
    parts = [tensor.flatten() for tensor in tensors]
    return torch.cat(parts).square().mean().sqrt().item()


def rms_error(grads, exact):
    """Of all gradients together; both have to have the same."""
    assert grads.keys() == exact.keys()
    return rms_of(grads[name] - right for name, right in exact.items())


def assert_gradients_as_accurate(fused, plain, exact, what=""):
    """RMS error against float64 at most 1.5 times the unpatched run's; both runs are
    far nearer than a wrong sum.
    """
    ours = rms_error(fused, exact)
    theirs = rms_error(plain, exact)
    size = rms_of(exact.values())
    what = f"{what}: {ours:.2e}, unpatched {theirs:.2e} of {size:.2e}"
    assert theirs < 0.05 * size, what
    assert ours <= 1.5 * theirs + 1e-7 * size, what


@contextlib.contextmanager
def counted(model):
    """What runs in a ``with``: kernels by name, and "sums" computed with a norm."""
    ran = Counter()
    watched = None
    if is_patched(model):
        watched = model
    with use_backend("triton"), count_launches(watched) as launches:
        yield ran
    ran.update(launches)
    for piece in launches.pieces:
        if piece.what == "residual add + norm" and piece.launched:
            ran["sums"] += piece.launched
