"""Runs a few statements of PTX by the executor, to try it."""

import numpy as np
import torch

from .decode import Kernel
from .machine import Machine

THREADS = 64
TEXT = """
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0,
	.param .u64 .ptr .global .align 1 probe_param_1,
	.param .f32 probe_param_2
)
.reqntid THREADS
{
	ld.param.b64 	%rd1, [probe_param_0];
	ld.param.b64 	%rd2, [probe_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	shl.b32 	%r2, %r1, 2;
	xor.b32 	%r3, %r2, 4;
	xor.b32 	%r4, %r2, 128;
	setp.lt.u32 	%p1, %r1, 16;
BODY
	ret;
}
"""


def numbers(count=THREADS):
    return torch.arange(count, dtype=torch.int32)


def launch(
    body, source=None, target=None, grid=(1, 1, 1), threads=THREADS, blurred=False
):
    """The target, as a kernel wrote it in which thread t has its element of source at
    %rd4, of target at %rd5, and in shared memory at %r2 = 4 * t.
    """
    if source is None:
        source = numbers()
    if target is None:
        target = torch.full((THREADS,), -1, dtype=torch.int32)
    text = TEXT.replace("THREADS", str(threads))
    text = text.replace("BODY", body)
    machine = Machine(blurred=blurred)
    shared = 4 * THREADS
    machine.launch(Kernel(text), grid, shared, [source, target, 0.5])
    return target


def computed(statements, *operands, blurred=False):
    """What statements make in %r9 of 32-bit operands in %r20 and on, each an array that
    is repeated.
    """
    loads = []
    arrays = []
    for number, operand in enumerate(operands):
        array = np.resize(operand, THREADS)
        arrays.append(array.view(np.int32))
        offset = 4 * THREADS * number
        loads.append(f"ld.global.b32 %r{20 + number}, [%rd4+{offset}];")
    source = torch.from_numpy(np.concatenate(arrays))
    body = "\n".join([*loads, statements, "st.global.b32 [%rd5], %r9;"])
    target = launch(body, source, blurred=blurred)
    return target.numpy()
