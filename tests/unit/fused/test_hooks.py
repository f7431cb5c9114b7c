"""Hooks and wrappers around a norm: those that leave its input, output and weight as
they are do not keep it from being computed with a sum, and others do.
"""

import functools

import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.hooks import ModelHook as DiffusersHook
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.sums import add_and_norm

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")

D = 16
LEFT, RIGHT = torch.randn(2, 3, D).unbind()


class Doubles(AlignDevicesHook):
    def post_forward(self, module, output):
        return 2 * output


def hooked(*hooks):
    def put(norm):
        for hook in hooks:
            add_hook_to_module(norm, hook(), append=True)

    return put


def wrapped_by_a_user(norm):
    own = norm.forward

    @functools.wraps(own)
    def twice(x):
        return own(own(x))

    norm.forward = twice


def hooked_by_diffusers(norm):
    registry = HookRegistry.check_if_exists_or_initialize(norm)
    registry.register_hook(DiffusersHook(), "any")


def sums_gradients(norm):
    layer = tensor_parallel.ReplicatedWithGradAllReduce()
    layer.install_forward(norm, None)


def plain_tensor_parallel(norm):
    tensor_parallel.TensorParallelLayer().install_forward(norm, None)


def hook_taken_off(norm):
    add_hook_to_module(norm, AlignDevicesHook("cpu"))
    remove_hook_from_module(norm)  # it leaves a forward on the instance


align = functools.partial(AlignDevicesHook, "cpu")
HARMLESS = {
    "aligns devices": hooked(align),
    "a torch.device": hooked(lambda: AlignDevicesHook(torch.device("cpu"))),
    "output to where its input was": hooked(lambda: align(io_same_device=True)),
    "taken off again": hook_taken_off,
    "tensor parallel, without gradients": sums_gradients,
    "tensor parallel and a hook": lambda norm: (sums_gradients(norm), hooked(align)(norm)),
}  # fmt: skip
ACTING = {
    "offloads": (hooked(lambda: align(offload=True)), "AlignDevicesHook, which loads"),
    "several": (hooked(ModelHook, align), "hooks.SequentialHook"),
    "subclass": (hooked(lambda: Doubles("cpu")), "test_hooks.Doubles"),
    "loads the module": (hooked(lambda: CpuOffload("cpu")), "hooks.CpuOffload"),
    "casts": (
        hooked(lambda: LayerwiseCastingHook(torch.bfloat16, torch.float32, False)),
        "hooks.LayerwiseCastingHook",
    ),
    "diffusers": (hooked_by_diffusers, "diffusers.hooks.hooks"),
    "a user's wrapper": (wrapped_by_a_user, "twice"),
    "tensor parallel": (plain_tensor_parallel, "TensorParallelLayer.install_forward"),
}
orders = pytest.mark.parametrize("order", ["hook first", "patch first"])


def made(order, put):
    """A patched norm with hooks, and the result that it gives with these alone."""
    norm, plain = LlamaRMSNorm(D), LlamaRMSNorm(D)
    if order == "hook first":
        put(norm)
        patch_model(norm)
    else:
        patch_model(norm)
        put(norm)
    put(plain)
    return norm, plain


@pytest.mark.parametrize("undone", ["hook off first", "patch off first"])
@orders
@pytest.mark.parametrize("what", HARMLESS)
def test_a_hook_without_effect_keeps_nothing_apart(what, order, undone, fused_sums):
    norm, plain = made(order, HARMLESS[what])
    with torch.no_grad(), use_backend("triton"):
        total, y = add_and_norm(LEFT, RIGHT, norm)
        assert fused_sums
        assert torch.equal(total, LEFT + RIGHT)
        torch.testing.assert_close(y, plain(total))
    steps = [remove_hook_from_module, unpatch_model]
    if undone == "patch off first":
        steps.reverse()
    for step in steps:
        step(norm)
    assert type(norm) is LlamaRMSNorm
    assert torch.equal(norm(total), plain(total))


@orders
@pytest.mark.parametrize("what", ACTING)
@pytest.mark.filterwarnings("ignore:patch_model changed no norm")
def test_a_hook_that_acts_runs_and_is_named(what, order, fused_sums):
    put, name = ACTING[what]
    norm, plain = made(order, put)
    with torch.no_grad(), use_backend("reference"):
        total, y = add_and_norm(LEFT, RIGHT, norm)
    assert not fused_sums
    torch.testing.assert_close(y, plain(total))
    report = patch_model(norm)
    # not swapped at all where the wrapper hides the forward of the class
    texts = [record.notes for record in report.swapped]
    texts += [record.reason for record in report.skipped]
    assert name in texts[0]


@pytest.mark.parametrize("what", ["offloads", "diffusers", "tensor parallel"])
def test_what_is_counted_names_the_wrapper(what):
    put, name = ACTING[what]
    model = nn.Sequential(made("patch first", put)[0])
    with torch.no_grad(), use_backend("triton"), count_launches(model) as launches:
        add_and_norm(LEFT, RIGHT, model[0])
    reasons = [piece.reason for piece in launches.pieces if not piece.has_run]
    assert name in reasons[0]


def test_the_first_call_with_gradients_hooks_the_gradient_of_the_weight(fused_sums):
    norm, _ = made("patch first", sums_gradients)
    left = LEFT.clone().requires_grad_()
    with use_backend("triton"):
        add_and_norm(left, RIGHT, norm)
        assert not fused_sums
        for _ in range(2):
            add_and_norm(left, RIGHT, norm)
    assert len(fused_sums) == 2
    assert len(norm.weight._post_accumulate_grad_hooks) == 1


def test_a_hook_that_moves_the_input_from_the_weight_is_named(fused_sums):
    norm, _ = made("patch first", hooked(lambda: AlignDevicesHook("meta")))
    norm.weight = nn.Parameter(torch.ones(D))
    (record,) = patch_model(norm).swapped
    assert "AlignDevicesHook, which moves its input" in record.notes


def test_the_device_of_the_input_is_that_of_the_weight_or_nothing_is_fused(fused_sums):
    norm, _ = made("patch first", hooked(lambda: AlignDevicesHook("meta")))
    total, y = add_and_norm(LEFT, RIGHT, norm)
    assert not fused_sums
    assert (total.device.type, y.device.type) == ("cpu", "meta")


def test_a_norm_without_a_weight_may_get_its_input_from_anywhere(fused_sums):
    norm = nn.RMSNorm(D, elementwise_affine=False)
    patch_model(norm)
    add_hook_to_module(norm, align())
    add_and_norm(LEFT, RIGHT, norm)
    assert not fused_sums
