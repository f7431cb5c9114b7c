"""A Triton driver that names a target and launches nothing, so that kernels compile
without a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace


class StubDriver:
    """What Triton asks of the active driver.

    Args:
        target: a `triton.backends.compiler.GPUTarget`.
        shared: bytes of shared memory that one program may use.
        index: the number of the device, by which Triton keeps its compiled kernels.
    """

    def __init__(self, target, shared: int, index: int = 0):
        self.target, self.index = target, index
        self.utils = SimpleNamespace(
            # a module that is None would be loaded again by each launch
            load_binary=lambda *_: ("module", None, 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": shared},
        )

    def launcher_cls(self, source, metadata):
        return CudaLauncher()

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.index

    def get_current_stream(self, device):
        return 0


class CudaLauncher:
    """A launcher with the name of Triton's for NVIDIA kernels; it launches nothing."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations = kernel_signature = None

    def launch(self, *_):
        pass

    def __call__(self, *_):
        pass
