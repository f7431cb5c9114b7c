"""Prints, as JSON, what the launch code asks of Triton for a target of benchmarks/aot.py.

"rows" are the norms', "heads" those of q and k. It is a script for test_launch.py: Triton compiles nothing in a process
where it interprets.
"""

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

from places import ROOT

sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks import aot  # noqa: E402
from hf_rmsnorm.formula import NormSpec  # noqa: E402
from hf_rmsnorm.kernels import compiled, plan  # noqa: E402

N = 64
D = 64  # of a head of q and k
LLAMA = NormSpec(centered=False, eps=1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(centered=True, eps=1e-5, has_bias=True)


def step(x, dy, spec=LLAMA, residual=None):
    """One forward and one backward; where there is a residual, it also lies in memory like the gradient of the sum."""
    weight = torch.empty(x.shape[-1], dtype=x.dtype)
    bias = torch.empty_like(weight) if spec.has_bias else None
    _, rstd, mean, h = aot.launch.norm_forward(x, weight, bias, spec, True, None, residual)
    x = x if h is None else h
    need = (True, True, spec.has_bias)
    aot.launch.norm_backward(dy, x, weight, bias, rstd, mean, spec, need, None, residual)


def forget():
    """Empty the launch code's own caches, so that the next launches go through Triton."""
    plan.forget()
    for kernel in aot.KERNELS:
        kernel._compiled.clear()


def compiles():
    """By kernel, the compiles Triton holds in both variants, and the compiled kernels the launch code holds."""
    index = aot.driver.active.get_current_device()
    return {
        kernel.name: [
            sum(len(variant.device_caches[index][0]) for variant in set(kernel._variants.values())),
            len(kernel._compiled),
        ]
        for kernel in aot.KERNELS
        if kernel._compiled
    }


def tell_launches(function):
    """Make Triton call a function before each launch, or with None nothing."""
    hooks = triton.knobs.runtime
    if not hasattr(hooks.launch_enter_hook, "calls"):  # Triton 3.4 keeps one function, later ones a chain of them
        hooks.launch_enter_hook = function
        return
    hooks.launch_enter_hook.calls[:] = [] if function is None else [function]


def views(aligned):
    """Rows in many numbers and at many strides; every third value is one or a multiple of 16."""
    shift = 0 if aligned else 1
    columns = slice(shift, shift + N)
    for length in (1, 2, 3, 16, 17, 48):
        for width in (N, N + 8, N + 16, 16 * N):
            packed = torch.empty(2, length, 3, width + shift, dtype=torch.bfloat16)
            yield packed[0, :, 0, columns]
            yield packed[:, :, 1, columns]  # (outer, inner)
            yield packed[:, :, 2, columns].transpose(0, 1)


def described(launched):
    """A recorded launch as values that two launches of the same work share."""
    source, _, (*launch, _, _, _), arguments = *launched[:2], launched[2][:9], launched[2][9:]  # less hooks, their data
    values = [[str(a.dtype), *a.shape] if isinstance(a, torch.Tensor) else a for a in arguments]
    return [source.name, launch, dict(zip(source.fn.arg_names, values, strict=True))]


def signature(source):
    aligned = [source.fn.arg_names[path[0]] for path, found in source.attrs.items() if found]
    return {"signature": dict(source.signature), "aligned": aligned}


def heads(batch, count, length, layout, shift, dtype=torch.bfloat16):
    """(batch, count, length, D), `shift` elements behind an aligned address."""
    if layout == "projected":
        whole = torch.empty(batch, length, count * D + shift, dtype=dtype)[..., shift:]
    elif layout == "packed":
        whole = torch.empty(batch, length, (count + 3) * D + shift, dtype=dtype)[..., shift : count * D + shift]
    else:
        return torch.empty(batch, count, length, D + shift, dtype=dtype)[..., shift:]
    return whole.unflatten(-1, (count, D)).transpose(1, 2)


def shapes():
    """64 (batch, heads, key heads, length, layout): ones, multiples of 16 and others, transposed or not."""
    sizes = [(b, h, s) for b in (1, 2, 3, 16) for h in ((1, 1), (4, 2), (32, 8), (6, 3)) for s in (1, 7)]
    sizes += [(b, h, s) for b in (1, 2) for h in ((4, 1), (16, 16)) for s in (16, 48, 333, 1000)]
    sizes += [(1, (32, 8), 2**k) for k in range(12)]
    sizes += [(5, (2, 2), 9), (7, (3, 1), 33), (2, (8, 8), 128), (4, (5, 5), 5)]
    for i, (batch, (q_heads, k_heads), length) in enumerate(sizes):
        yield batch, q_heads, k_heads, length, ("projected", "packed", "contiguous")[i % 3]


def step_of_heads(batch, q_heads, k_heads, length, layout, shift, turned=True):
    q, k = (heads(batch, count, length, layout, shift) for count in (q_heads, k_heads))
    weights = [torch.empty(D, dtype=q.dtype) for _ in range(2)]
    tables = [torch.empty(1 if batch % 2 else batch, length, D, dtype=q.dtype) if turned else None for _ in range(2)]
    *outputs, rstd, mean = aot.launch_qk.qk_norm_forward(q, k, (*weights, None, None), *tables, LLAMA, True)
    dq, dk = (torch.empty_like(y) for y in outputs)
    aot.launch_qk.qk_norm_backward(
        dq, dk, q, k, (*weights, None, None), *tables, rstd, mean, LLAMA, (True,) * 4 + (False,) * 2
    )


def of_heads(recorder):
    facts = {"shapes": len(set(shapes()))}
    for shift in (0, 1):
        for shape in shapes():
            forget()  # so that Triton sees every value, and would compile for those it tells apart
            step_of_heads(*shape, shift)
        for shape in shapes():
            step_of_heads(*shape, shift)
        facts["aligned" if not shift else "unaligned too"] = compiles()

    for turned in (False, True):
        forget()
        recorder.launches.clear()
        for _ in range(2):
            step_of_heads(2, 4, 2, 5, "projected", 0, turned)
        half = len(recorder.launches) // 2
        first, again = recorder.launches[:half], recorder.launches[half:]
        facts.setdefault("repeats", []).append([list(map(described, first)), list(map(described, again))])
        for source, *_ in first:
            facts.setdefault("sources", {})[f"{source.name} {turned=}"] = signature(source)
    recorder.launches.clear()
    return facts


def of_rows(recorder, target):
    facts = {}
    for aligned in (True, False):
        for x in views(aligned):
            forget()  # so that Triton sees every value, and would compile for those it tells apart
            step(x, torch.empty(x.shape, dtype=x.dtype))
        for x in (x for known in {True, aligned} for x in views(known)):
            step(x, torch.empty(x.shape, dtype=x.dtype))
        facts["compiles_aligned" if aligned else "compiles_with_unaligned"] = compiles()
    residuals = [r for aligned in (True, False) for r in views(aligned)]
    for again in (False, True):
        for residual in residuals:
            if not again:
                forget()
            dense = torch.empty(residual.shape, dtype=residual.dtype)
            step(dense, dense, residual=residual)
    facts["compiles_with_residual"] = compiles()

    recorder.launches.clear()
    forget()
    for spec, residual in product((LLAMA, LAYER_NORM), (False, True)):
        for hidden_size in (64, 14_336):
            x = torch.empty(3, hidden_size, dtype=torch.bfloat16)
            step(x, x.clone(), spec, x if residual else None)
            half = len(recorder.launches)
            step(x, x.clone(), spec, x if residual else None)
            first, again = recorder.launches[:half], recorder.launches[half:]
            facts.setdefault("repeats", []).append([list(map(described, first)), list(map(described, again))])
            if spec is LLAMA and hidden_size == 64:
                facts.setdefault("sources", {}).update(
                    {
                        f"{source.name} {'with' if residual else 'without'} residual": signature(source)
                        for source, *_ in first
                    }
                )
            recorder.launches.clear()

    told = []
    dense = torch.empty(3, N, dtype=torch.bfloat16)
    step(dense, dense)
    facts["unhooked"] = [launched[2][6:9] for launched in recorder.launches]
    recorder.launches.clear()
    tell_launches(told.append)
    step(dense, dense)
    for _, _, arguments in recorder.launches:
        metadata, enter, _ = arguments[6:9]
        enter(metadata)  # as a launcher that launches does
    tell_launches(None)
    facts["hooked"] = [metadata.get()["name"] for metadata in told]
    recorder.launches.clear()

    if target == "gfx942":
        compiled.HIP = True
        forget()
        with tempfile.TemporaryDirectory() as folder:
            name = str(Path(folder) / "storage")
            with open(name, "wb") as file:
                file.truncate(2**31 + 4096)  # sparse: takes no room
            large = torch.from_file(name, shared=True, size=2**30 + 2048, dtype=torch.bfloat16)
            for x in (torch.empty(3, N, dtype=torch.bfloat16), large[-3 * N :].view(3, N)):
                step(x, torch.empty(3, N, dtype=torch.bfloat16))
                source = next(s for s, *_ in recorder.launches if s.name == "norm_forward")
                facts.setdefault("x_attributes", []).append([kind for kind, _ in source.attrs[(0,)]])
                recorder.launches.clear()
    return facts


def main(target):
    recorder = aot.compile_for(target)
    print(json.dumps({"heads": of_heads(recorder), "rows": of_rows(recorder, target)}))


if __name__ == "__main__":
    main(sys.argv[1])
