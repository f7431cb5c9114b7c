"""A Triton driver for sm_90 whose launches, on CPU tensors, are executed from their PTX."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

from .decode import Kernel
from .machine import Machine

TRITON = "3.9.0"  # the version whose PTX is spoken
SMS, SHARED_LIMIT = 2, 232_448  # few multiprocessors, so that persistent loops are walked


class Driver:
    """What Triton asks of the active driver.

    Attributes:
        machine: what executes the launches.
        launches: where each launch is kept, as (kernel, grid, bytes of shared memory, arguments); or None.
    """

    def __init__(self, machine: Machine | None = None):
        from triton.backends.compiler import GPUTarget

        self.machine = machine or Machine()
        self.launches: list[tuple] | None = None
        self.target = GPUTarget("cuda", 90, 32)
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (None, Kernel(binary.decode()), 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": SHARED_LIMIT},
        )

    def launcher_cls(self, source, metadata) -> Callable:
        kept = [k for k, name in enumerate(source.fn.arg_names) if source.signature[name] != "constexpr"]

        def launch(x, y, z, stream, kernel, packed, about, enter, leave, *values):
            if x * y * z == 0:
                return
            arguments = [values[k] for k in kept]
            arguments += [None] * (len(kernel.params) - len(arguments))  # Triton's scratch memory, which nothing uses
            if self.launches is not None:
                self.launches.append((kernel, (x, y, z), metadata.shared, arguments))
            self.machine.launch(kernel, (x, y, z), metadata.shared, arguments)

        return launch

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def _stop_at_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """A hook of Triton's: no assembler, the PTX is the binary. Asked for nothing it names itself, for the cache."""
    if stages is None:
        return "ptx", "ptx"
    stages["cubin"] = lambda text, metadata: text.encode()


def execute_ptx() -> Driver:
    """Make this process compile its kernels for sm_90, and execute them on CPU tensors; before triton is imported.

    The package serves CPU tensors where TRITON_INTERPRET is 1, so that is what the environment says, to child
    processes too; Triton alone is told otherwise.
    """
    os.environ["TRITON_INTERPRET"] = "0"
    import torch
    import triton

    knobs = triton.knobs
    knobs.propagate_env = False
    knobs.runtime.interpret = False
    knobs.propagate_env = True
    os.environ["TRITON_INTERPRET"] = "1"
    knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    limits = SimpleNamespace(multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_LIMIT)
    torch.cpu.get_device_properties = lambda index=None: limits  # torch has none for the CPU
    return driver
