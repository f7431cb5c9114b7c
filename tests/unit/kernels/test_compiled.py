"""How a kernel is started: its arguments by name, the device that is current, and what
is loaded of it.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="there is nothing to launch without Triton")

from hf_rmsnorm import count_launches  # noqa: E402
from hf_rmsnorm.kernels import (  # noqa: E402
    c_launcher,
    compiled,
    norm_launch,
    qk_launch,
)
from hf_rmsnorm.kernels.compiled import VECTOR, Kernel  # noqa: E402
from hf_rmsnorm.kernels.failure import KernelUnavailable  # noqa: E402

KERNELS = {kernel.name: kernel for kernel in (*norm_launch.KERNELS, *qk_launch.KERNELS)}
CPU = torch.device("cpu")


def numbered(kernel):
    """Every parameter that is bound, each with a number of its own."""
    names = [name for name in kernel.fixed if name != "UNIT"]
    return {name: VECTOR * i for i, name in enumerate(names)}


def bound(kernel, aligned=True, device=CPU):
    return kernel.bind((1, 1, 1), 4, numbered(kernel), device, aligned)


@pytest.mark.parametrize("name", KERNELS)
def test_pointers_come_first_and_every_other_parameter_gets_what_has_its_name(name):
    kernel = KERNELS[name]
    parameters = list(inspect.signature(kernel.variants[True].fn).parameters)
    assert parameters == kernel.pointers + kernel.fixed
    for aligned, unit in ((False, 1), (True, VECTOR)):
        ready = bound(kernel, aligned)
        values = dict(zip(kernel.fixed, ready.tail, strict=True))
        for parameter, number in numbered(kernel).items():
            if parameter in kernel.strides:
                number = number // unit
            assert values[parameter] == number
        assert values.get("UNIT", unit) == unit


def test_vectors_need_strides_and_columns_that_they_divide():
    kernel = KERNELS["norm_forward"]
    assert bound(kernel).aligned
    assert not bound(kernel, aligned=False).aligned
    divided = {"N": True, "x_outer": True, "other_inner": True, "x_len": False}
    for name, is_divided in divided.items():
        odd = numbered(kernel) | {name: VECTOR + 1}
        ready = kernel.bind((1, 1, 1), 4, odd, CPU, True)
        assert ready.aligned != is_divided


class Loaded:
    """A kernel that Triton has compiled; `run` loads it, and fails while `capturing`."""

    _run = None
    function = "function"
    packed_metadata = "metadata"
    capturing = False

    def __init__(self, launcher):
        self.launcher = launcher
        self.calls = []

    @property
    def run(self):
        if self._run is None:
            self._run = self.launcher
            if self.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
        return self._run

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("compiled", grid, args))


class CudaLauncher:
    """Triton's of 3.4, by its name and by what is read of it."""

    global_scratch_size = 0
    launch_cooperative_grid = "coop"
    launch_pdl = "pdl"

    def __init__(self):
        self.calls = []

    def launch(self, *args):
        self.calls.append(args)


class LauncherOf35(CudaLauncher):
    profile_scratch_size = 0


class LauncherOf37(LauncherOf35):
    """Told what a kernel's parameters are."""

    arg_annotations = "annotations"
    kernel_signature = "signature"


LauncherOf35.__name__ = LauncherOf37.__name__ = "CudaLauncher"
HEAD = [1, 1, 1, "stream of 5", "function", "coop", "pdl"]
CALLS = [  # a launcher, and what it is called with but for the kernel's arguments
    (CudaLauncher, [*HEAD, None, "metadata", *3 * [None]]),
    (LauncherOf35, [*HEAD, None, None, "metadata", *3 * [None]]),
    (LauncherOf37, [*HEAD, "metadata", *5 * [None], "annotations", "signature"]),
]


@pytest.fixture
def load(monkeypatch):
    """``load(launcher, known)``: (start of a kernel, what Triton made of it, the kernel's
    own calls).
    """

    def make(launcher=LauncherOf37, known=True):
        kernel = Kernel(KERNELS["reduce_partials"].variants[True])
        made = Loaded(launcher())
        calls = []

        class Variant:
            def warmup(self, *args, **options):
                return made

            def __getitem__(self, grid):
                return lambda *args, **options: calls.append((grid, args, options))

        kernel.variants = {True: Variant(), False: Variant()}
        monkeypatch.setattr(compiled, "INTERPRETED", False)
        monkeypatch.setattr(c_launcher, "KNOWN", known)
        driver = SimpleNamespace(
            get_current_stream=lambda index: f"stream of {index}",
            get_current_device=lambda: 5,
        )
        monkeypatch.setattr(
            compiled.triton.runtime, "driver", SimpleNamespace(active=driver)
        )
        return bound(kernel), made, calls

    return make


@pytest.mark.parametrize(("launcher", "expected"), CALLS, ids=["3.4", "3.5", "3.7"])
def test_the_launcher_in_c_is_called_as_each_triton_calls_it(launcher, expected, load):
    ready, made, _ = load(launcher)
    arguments = ("partials", "out", *ready.tail)
    if launcher is LauncherOf37:
        arguments = (arguments,)
    for _ in range(2):
        ready.start(("partials", "out"))
    assert made.launcher.calls == [(*expected, *arguments)]


def test_hooks_and_counters_are_told_of_a_launch(load, monkeypatch):
    ready, made, _ = load()
    ready.start(("partials", "out"))
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(c_launcher._knobs, name, lambda about: None)
            ready.start((name, "out"))
        assert made.calls[-1] == ("compiled", (1, 1, 1), (name, "out", *ready.tail))
    with count_launches() as launches:
        ready.start(("partials", "out"))
    assert launches == {"reduce_partials": 1}


def test_the_triton_that_is_installed_is_known():
    """If this fails: read CudaLauncher in its backends/nvidia/driver.py beside
    `c_launcher`, compare the arguments, and name the version there, and in `TRITONS` of
    benchmarks/ptx/driver.py.
    """
    assert c_launcher.KNOWN, c_launcher.VERSION


def test_another_launcher_is_called_by_triton(load):
    ready, made, calls = load(SimpleNamespace)
    ready.start(("partials", "out"))
    assert made.calls == [("compiled", (1, 1, 1), ("partials", "out", *ready.tail))]
    assert not calls


def test_a_triton_that_is_not_known_starts_the_function_itself(load):
    ready, made, calls = load(known=False)
    ready.start(("partials", "out"))
    arguments = ("partials", "out", *ready.tail)
    options = ready.kernel.options(ready)
    assert calls == [((1, 1, 1), arguments, options)]
    assert not made.calls


def test_a_kernel_that_could_not_be_loaded_is_loaded_by_the_next_launch(load):
    """As in a CUDA graph that is captured, where Triton takes it for loaded ever after."""
    ready, made, _ = load()
    made.capturing = True
    with pytest.raises(RuntimeError, match="capturing"):
        ready.start((1, 2))
    assert made._run is None
    assert not made.calls
    made.capturing = False
    ready.start((1, 2))
    assert len(made.calls) == 1


def test_what_fails_to_compile_is_unavailable_and_is_not_tried_again(load):
    ready, _, _ = load()
    tried = []

    def warmup(*_, **__):
        tried.append(1)
        raise FileNotFoundError("not there")

    ready.kernel.variants[True].warmup = warmup
    with pytest.raises(KernelUnavailable, match="not there"):
        ready.start((1, 2))
    compiled.failed_devices[CPU] = "said before"
    try:
        with pytest.raises(KernelUnavailable, match="said before"):
            ready.start((1, 2))
    finally:
        del compiled.failed_devices[CPU]
    assert len(tried) == 1


def test_the_device_of_the_tensors_is_current_while_a_kernel_is_compiled_and_launched(
    load, monkeypatch
):
    now = [0]
    seen = []

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before = now[0]
            now[0] = self.index

        def __exit__(self, *_):
            now[0] = self.before

    monkeypatch.setattr(compiled, "current_device", lambda kind: lambda: now[0])
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(device=Device)
    )
    ready, made, _ = load()
    ready = bound(ready.kernel, device=torch.device("cuda", 1))
    warmup = ready.kernel.variants[True].warmup

    def compile_there(*args, **options):
        seen.append(now[0])
        return warmup(*args, **options)

    ready.kernel.variants[True].warmup = compile_there
    for current in (0, 1, 0):
        now[0] = current
        ready.start(("partials", "out"))
        assert now[0] == current
    assert seen == [1]
    # directly where it is current
    assert len(made.launcher.calls) == 1
    assert len(made.calls) == 2
