"""How a kernel is started: its arguments by name, the device that is current, and what
is loaded of it.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="there is nothing to launch without Triton")

from hf_rmsnorm import count_launches  # noqa: E402
from hf_rmsnorm.kernels import compiled, launch, launch_qk  # noqa: E402
from hf_rmsnorm.kernels.compiled import VECTOR, Kernel  # noqa: E402
from hf_rmsnorm.kernels.failure import KernelUnavailable  # noqa: E402

KERNELS = {kernel.name: kernel for kernel in (*launch.KERNELS, *launch_qk.KERNELS)}
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
        start = bound(kernel, aligned)
        values = dict(zip(kernel.fixed, start.tail, strict=True))
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
        start = kernel.bind((1, 1, 1), 4, odd, CPU, True)
        assert start.aligned != is_divided


def test_a_chip_that_names_no_multiprocessors_or_shared_memory(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_device_properties", vars, raising=False)
    monkeypatch.setattr(compiled, "INTERPRETED", False)
    assert compiled.device_limits.__wrapped__("cpu", SimpleNamespace()) == (64, 65_536)


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
    """Triton's, by its name and by what is read of it."""

    global_scratch_size = 0
    profile_scratch_size = 0
    launch_cooperative_grid = "coop"
    launch_pdl = "pdl"
    arg_annotations = "annotations"
    kernel_signature = "signature"

    def __init__(self):
        self.calls = []

    def launch(self, *args):
        self.calls.append(args)


@pytest.fixture
def load(monkeypatch):
    """``load(known, plain)``: (start of a kernel, what Triton made of it, the kernel's
    own calls).
    """

    def make(launchers=True, plain=True, by_compiled=True):
        kernel = Kernel(KERNELS["reduce_partials"].variants[True])
        made = Loaded(CudaLauncher())
        calls = []
        if not plain:
            made.launcher = SimpleNamespace()

        class Variant:
            def warmup(self, *args, **options):
                return made

            def __getitem__(self, grid):
                return lambda *args, **options: calls.append((grid, args, options))

        kernel.variants = {True: Variant(), False: Variant()}
        monkeypatch.setattr(compiled, "INTERPRETED", False)
        monkeypatch.setattr(compiled, "KNOWN_LAUNCHERS", launchers)
        monkeypatch.setattr(compiled, "KNOWN_COMPILED", by_compiled)
        driver = SimpleNamespace(
            get_current_stream=lambda index: f"stream of {index}",
            get_current_device=lambda: 5,
        )
        monkeypatch.setattr(
            compiled.triton.runtime, "driver", SimpleNamespace(active=driver)
        )
        return bound(kernel), made, calls

    return make


def test_a_known_launcher_is_called_and_hooks_and_counters_are_told(load, monkeypatch):
    start, made, _ = load()
    for _ in range(2):
        start.on(("partials", "out"))
    *direct, arguments = made.launcher.calls[-1]
    expected = [1, 1, 1, "stream of 5", "function", "coop", "pdl", "metadata"]
    expected += [None] * 5
    expected += ["annotations", "signature"]
    assert direct == expected
    assert arguments == ("partials", "out", *start.tail)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(compiled._hooks, name, lambda about: None)
            start.on((name, "out"))
        assert made.calls[-1] == ("compiled", (1, 1, 1), (name, "out", *start.tail))
    with count_launches() as launches:
        start.on(("partials", "out"))
    assert launches == {"reduce_partials": 1}


@pytest.mark.parametrize(
    "known",
    [{"plain": False}, {"launchers": False}],
    ids=["another launcher", "an older Triton"],
)
def test_a_launcher_that_is_not_known_is_called_by_triton(known, load):
    start, made, calls = load(**known)
    start.on(("partials", "out"))
    assert made.calls == [("compiled", (1, 1, 1), ("partials", "out", *start.tail))]
    assert not calls


def test_any_other_triton_is_given_the_function(load):
    start, made, calls = load(launchers=False, by_compiled=False)
    start.on(("partials", "out"))
    arguments = ("partials", "out", *start.tail)
    options = start.kernel.options(start)
    assert calls == [((1, 1, 1), arguments, options)]
    assert not made.calls


def test_a_kernel_that_could_not_be_loaded_is_loaded_by_the_next_launch(load):
    """As in a CUDA graph that is captured, where Triton takes it for loaded ever after."""
    start, made, _ = load()
    made.capturing = True
    with pytest.raises(RuntimeError, match="capturing"):
        start.on((1, 2))
    assert made._run is None
    assert not made.calls
    made.capturing = False
    start.on((1, 2))
    assert len(made.calls) == 1


def test_what_fails_to_compile_is_unavailable_and_is_not_tried_again(load):
    start, _, _ = load()
    tried = []

    def warmup(*_, **__):
        tried.append(1)
        raise FileNotFoundError("not there")

    start.kernel.variants[True].warmup = warmup
    with pytest.raises(KernelUnavailable, match="not there"):
        start.on((1, 2))
    compiled.failed[CPU] = "said before"
    try:
        with pytest.raises(KernelUnavailable, match="said before"):
            start.on((1, 2))
    finally:
        del compiled.failed[CPU]
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
    start, made, _ = load()
    start = bound(start.kernel, device=torch.device("cuda", 1))
    warmup = start.kernel.variants[True].warmup

    def compile_there(*args, **options):
        seen.append(now[0])
        return warmup(*args, **options)

    start.kernel.variants[True].warmup = compile_there
    for current in (0, 1, 0):
        now[0] = current
        start.on(("partials", "out"))
        assert now[0] == current
    assert seen == [1]
    # directly where it is current
    assert len(made.launcher.calls) == 1
    assert len(made.calls) == 2
