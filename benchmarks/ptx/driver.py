"""A Triton driver for sm_90, or another NVIDIA chip, whose launches, on CPU tensors,
are executed from their PTX.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

from benchmarks.driver import StubDriver

from .decode import Kernel
from .machine import Machine

# The versions whose PTX is read: of the torch releases that are served, and 3.9.
TRITONS = ("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9.")
NEEDED = "Triton 3.4 to 3.9"
# in the environment: by what pytest's workers run kernels, as pytest itself does
RUN_BY = "HF_RMSNORM_TESTS_RUN_BY"
CHIP = "HF_RMSNORM_TESTS_SM"  # in the environment: what is compiled for, 90 without it
# bytes that one program may use
SHARED_LIMIT = {70: 98_304, 75: 65_536, 80: 166_912, 90: 232_448}
SMS = 2  # few multiprocessors, so that persistent loops are walked


class Driver(StubDriver):
    """What Triton asks of the active driver.

    Attributes:
        machine: what executes the launches.
        launches: where each launch is kept, as (kernel, grid, bytes of shared memory,
            arguments); or None.
    """

    def __init__(self, chip: int):
        from triton.backends.compiler import GPUTarget

        super().__init__(GPUTarget("cuda", chip, 32), SHARED_LIMIT[chip])
        self.utils.load_binary = _load
        self.machine = Machine()
        self.launches = None

    def launcher_cls(self, source, metadata) -> Callable:
        names = source.fn.arg_names
        constant = [source.signature[name] == "constexpr" for name in names]

        def launch(x, y, z, stream, kernel, *values):
            values = zip(values[4:], constant, strict=True)
            arguments = [value for value, is_constant in values if not is_constant]
            # Triton's scratch memory, which nothing uses
            arguments += [None] * (len(kernel.params) - len(arguments))
            made = kernel, (x, y, z), metadata.shared, arguments
            if self.launches is not None:
                self.launches.append(made)
            self.machine.launch(*made)

        return launch


def _load(name: str, binary: bytes, shared: int, device: int) -> tuple:
    """(module, function, registers, spilled bytes, most threads)."""
    return None, Kernel(binary.decode()), 0, 0, 1024


def _stop_at_ptx() -> None:
    """Let Triton hand over the PTX as the binary, and need no assembler."""
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages
    hash_of = CUDABackend.hash

    def without_assembler(backend, stages, *args):
        add_stages(backend, stages, *args)
        stages["cubin"] = lambda text, metadata: text.encode()

    CUDABackend.add_stages = without_assembler
    # Triton keeps what it compiled by this name: these are no kernels for a GPU
    CUDABackend.hash = lambda backend: f"ptx-{hash_of(backend)}"


def reads_ptx() -> bool:
    """Whether the PTX of the Triton that is installed is read."""
    return find_spec("triton") is not None and version("triton").startswith(TRITONS)


def run_kernels_on_cpu() -> bool:
    """Make this process and its children run kernels on CPU tensors; before triton is
    imported.

    Where Triton is a version whose PTX is read, this process and pytest's workers
    compile for the chip that CHIP names and execute the PTX; elsewhere, where
    TRITON_INTERPRET is set already and in other children, Triton's interpreter runs
    them. The package serves CPU tensors where TRITON_INTERPRET is 1, so that is what
    the environment says; Triton by itself is told otherwise.

    Returns whether PTX is executed.
    """
    if RUN_BY not in os.environ:
        if "TRITON_INTERPRET" in os.environ:
            return False
        run_by = "executor" if reads_ptx() else "interpreter"
        os.environ.update({RUN_BY: run_by, "TRITON_INTERPRET": "1"})
    if os.environ[RUN_BY] != "executor" or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    del os.environ["TRITON_INTERPRET"]  # read when triton is imported
    import torch
    from triton import knobs
    from triton.runtime import driver

    os.environ["TRITON_INTERPRET"] = "1"
    knobs.propagate_env = False
    knobs.runtime.interpret = False
    knobs.propagate_env = True
    _stop_at_ptx()
    chip = int(os.environ.get(CHIP, 90))
    driver.set_active(Driver(chip))  # as `driver.active` from now on
    limits = SimpleNamespace(
        multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_LIMIT[chip]
    )
    # torch has none for the CPU
    torch.cpu.get_device_properties = lambda index=None: limits
    return True
