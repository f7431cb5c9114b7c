"""As launch_probe.py, of the fused q/k norm: a script for test_launch_qk.py."""

import json
import sys

import torch
from launch_probe import LLAMA, aot, compiles, described, forget

D = 64


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
    sizes += [(1, (32, 8), 2**k) for k in range(12)] + [
        (5, (2, 2), 9),
        (7, (3, 1), 33),
        (2, (8, 8), 128),
        (4, (5, 5), 5),
    ]
    for i, (batch, (q_heads, k_heads), length) in enumerate(sizes):
        yield batch, q_heads, k_heads, length, ("projected", "packed", "contiguous")[i % 3]


def step(batch, q_heads, k_heads, length, layout, shift, turned=True):
    q, k = (heads(batch, count, length, layout, shift) for count in (q_heads, k_heads))
    weights = [torch.empty(D, dtype=q.dtype) for _ in range(2)]
    tables = [torch.empty(1 if batch % 2 else batch, length, D, dtype=q.dtype) if turned else None for _ in range(2)]
    *outputs, rstd, mean = aot.launch_qk.qk_norm_forward(q, k, *weights, *tables, LLAMA, True, False)
    dq, dk = (torch.empty_like(y) for y in outputs)

    aot.launch_qk.qk_norm_backward(dq, dk, q, k, *weights, *tables, rstd, mean, LLAMA, (True,) * 4)


def main(target):
    recorder = aot.compile_for(target)
    facts = {"shapes": len(set(shapes()))}
    for shift in (0, 1):
        for shape in shapes():
            forget()  # so that Triton sees every value, and would compile for those it tells apart
            step(*shape, shift)
        for shape in shapes():
            step(*shape, shift)
        facts["aligned" if not shift else "unaligned too"] = compiles()

    for turned in (False, True):
        forget()
        recorder.launches.clear()
        for _ in range(2):
            step(2, 4, 2, 5, "projected", 0, turned)
        half = len(recorder.launches) // 2
        first, again = recorder.launches[:half], recorder.launches[half:]
        facts.setdefault("repeats", []).append([list(map(described, first)), list(map(described, again))])
        for source, *_ in first:
            facts.setdefault("sources", {})[f"{source.name} {turned=}"] = {
                "signature": dict(source.signature),
                "aligned": [source.fn.arg_names[path[0]] for path, found in source.attrs.items() if found],
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
