"""Arguments reach a kernel's parameters by name, in whatever order either side has them."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="there is nothing to launch without Triton")

from hf_rmsnorm.kernels import compiled, launch, launch_qk  # noqa: E402
from hf_rmsnorm.kernels.compiled import VECTOR, Kernel  # noqa: E402
from hf_rmsnorm.kernels.failure import KernelUnavailable  # noqa: E402

KERNELS = {kernel.name: kernel for kernel in (*launch.KERNELS, *launch_qk.KERNELS)}


def parameters(kernel):
    return inspect.signature(kernel._variants[True].fn).parameters


def bound_by_number(kernel):
    """What is bound of a kernel, each value a number of its own, and these by name."""
    given = set(inspect.signature(kernel._pack).parameters)
    fixed = {name: VECTOR * i for i, name in enumerate(parameters(kernel)) if name not in given | {"UNIT"}}
    return kernel.bind((1, 1, 1), 4, fixed, "key"), fixed, given - {"values"}


@pytest.mark.parametrize("name", KERNELS)
def test_every_parameter_gets_what_has_its_name(name):
    kernel = KERNELS[name]
    bound, fixed, given = bound_by_number(kernel)
    for aligned, unit in ((False, 1), (True, VECTOR)):
        args = bound.pack(bound.values[aligned], **{operand: operand for operand in given})
        assert len(args) == len(parameters(kernel))
        for value, (parameter, declared) in zip(args, parameters(kernel).items(), strict=True):
            stride = declared.annotation is not inspect.Parameter.empty and "int64" in str(declared.annotation)
            expected = {"UNIT": unit} | fixed | {operand: operand for operand in given}
            assert value == (expected[parameter] // unit if stride else expected[parameter]), parameter


@pytest.mark.parametrize("name", KERNELS)
def test_a_name_too_few_or_too_many_is_an_error(name):
    kernel = KERNELS[name]
    bound, fixed, given = bound_by_number(kernel)
    with pytest.raises(TypeError, match=f"{name} is not bound by BLOCK"):
        kernel.bind((1, 1, 1), 4, {k: v for k, v in fixed.items() if k != "BLOCK"}, "key")
    with pytest.raises(TypeError, match=f"{name} is not bound by doubled"):
        kernel.bind((1, 1, 1), 4, fixed | {"doubled": True}, "key")
    with pytest.raises(TypeError):
        bound.pack(bound.values[False], **{operand: operand for operand in given}, other=None)


def test_a_chip_that_names_no_multiprocessors_or_shared_memory(monkeypatch):
    made = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448, gpu_subslice_count=7)
    for gone, limits in ((None, (132, 232_448)), ("shared_memory_per_block_optin", (132, 65_536)),
                         ("multi_processor_count", (7, 65_536)), ("gpu_subslice_count", (64, 65_536))):  # fmt: skip
        if gone is not None:
            delattr(made, gone)
        monkeypatch.setattr(torch.cpu, "get_device_properties", lambda index: made, raising=False)
        monkeypatch.setattr(compiled, "INTERPRETED", False)
        assert compiled.device_limits.__wrapped__("cpu", None) == limits


@pytest.mark.skipif(compiled.INTERPRETED, reason="the interpreter loads nothing")
def test_a_kernel_that_could_not_be_loaded_is_loaded_by_the_next_launch(monkeypatch):
    """As in a CUDA graph that is captured, where Triton takes it for loaded ever after."""
    kernel, told = KERNELS["reduce_partials"], []

    class Loaded:
        _run, function, packed_metadata = None, "function", "metadata"

        @property
        def run(self):
            if self._run is None:
                self._run = lambda *args: told.append(args)
                if capturing:
                    raise RuntimeError("operation not permitted when stream is capturing")
            return self._run

    made = Loaded()
    bound, _, _ = bound_by_number(kernel)
    monkeypatch.setattr(kernel, "_compiled", {})
    monkeypatch.setattr(kernel, "_variants", {True: SimpleNamespace(warmup=lambda *args, **options: made)})
    capturing = True
    with pytest.raises(RuntimeError, match="capturing"):
        kernel(torch.device("cpu"), bound, (1, 2), True)
    assert made._run is None and not kernel._compiled and not told
    capturing = False
    kernel(torch.device("cpu"), bound, (1, 2), True)
    assert [args[-2:] for args in told] == [(1, 2)]


@pytest.mark.skipif(compiled.INTERPRETED, reason="the interpreter loads nothing")
def test_what_fails_to_compile_is_unavailable_and_what_fails_once_loaded_is_not(monkeypatch):
    def raises(*_, **__):
        raise FileNotFoundError("not there")

    kernel, loaded = KERNELS["reduce_partials"], SimpleNamespace(run=raises, function=0, packed_metadata=0)
    bound, _, _ = bound_by_number(kernel)
    for warmup, error in ((raises, KernelUnavailable), (lambda *_, **__: loaded, FileNotFoundError)):
        monkeypatch.setattr(kernel, "_compiled", {})
        monkeypatch.setattr(kernel, "_variants", {True: SimpleNamespace(warmup=warmup)})
        with pytest.raises(error, match="not there"):  # of the latter, as a hook of Triton raises it
            kernel.load_and_launch(torch.device("cpu"), bound, (1, 2), True)


def test_both_variants_and_every_way_have_a_code_of_their_own():
    kernel = KERNELS["reduce_partials"]
    _, fixed, _ = bound_by_number(kernel)
    codes = kernel.bind((1, 1, 1), 4, fixed, "one way", "another").codes
    assert len({code for of_variant in codes for code in of_variant}) == 4
    assert codes == kernel.bind((1, 1, 1), 4, fixed, "one way", "another").codes


def test_vectors_need_strides_and_columns_that_they_divide():
    kernel = KERNELS["norm_forward"]
    bound, fixed, _ = bound_by_number(kernel)
    assert bound.vectorised
    for name in ("N", "x_outer", "other_inner"):
        assert not kernel.bind((1, 1, 1), 4, fixed | {name: VECTOR + 1}, "key").vectorised
    assert kernel.bind((1, 1, 1), 4, fixed | {"x_len": VECTOR + 1}, "key").vectorised


def test_a_kernel_is_made_of_a_function_and_its_operands():
    again = Kernel(KERNELS["reduce_partials"]._variants[True], ("OUT", "PARTIALS", "NOT_READ"))
    bound = again.bind((1, 1, 1), 4, {"parts": 3, "N": 64, "BLOCK": 64, "ROWS": 32}, "key")
    assert bound.pack(bound.values[True], NOT_READ=0, OUT="out", PARTIALS="in") == ("in", "out", 3, 64, 64, 32)
