"""DTensors pass through the registered operators, gradients included: two gloo processes on the CPU."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_rmsnorm import count_launches, layer_norm, rms_norm, use_backend


def run_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(4, 3, 64, generator=generator) for _ in range(2))
    weight, bias = (torch.rand(64, generator=generator) for _ in range(2))
    functions = {"rms": lambda x, w, b: rms_norm(x, w), "layer": lambda x, w, b: layer_norm(x, w, b)}
    for function in functions.values():
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            dx, dw, db = (t.clone().requires_grad_() for t in (x, weight, bias))
            with use_backend("triton"):
                y = function(dx, dw, db)
                y.backward(dy)
            placements = [placement], [Replicate()], [Replicate()]
            operands = zip((x, weight, bias), placements, strict=True)
            sx, sw, sb = (distribute_tensor(t, mesh, p).requires_grad_() for t, p in operands)
            with use_backend("triton"), count_launches() as launches:
                sy = function(sx, sw, sb)
                sy.backward(distribute_tensor(dy, mesh, [placement]))
            assert launches["norm_forward"] == launches["norm_backward"] == 1
            torch.testing.assert_close(sy.full_tensor(), y)
            for sharded, whole in ((sx, dx), (sw, dw), (sb, db)):
                if whole.grad is not None:
                    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
    dist.destroy_process_group()


def test_dtensors_replicated_or_split_over_any_dimension(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # gloo is for the CPU, where only the interpreter runs the kernels
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    mp.spawn(run_rank, args=(tmp_path / "store",), nprocs=2)
