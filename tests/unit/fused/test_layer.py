"""When the norm behind a sum is computed with it: whatever manages, watches or replaces the norm keeps it apart."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused import handover, layer
from hf_rmsnorm.fused.layer import add, link
from hf_rmsnorm.kernels.plan import forget

D = 16


class Reader(nn.Module):
    """Reads what `Layer` returns."""

    def __init__(self):
        super().__init__()
        self.first = nn.RMSNorm(D, eps=1e-6)


class Layer(nn.Module):
    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-6)
        self.reader = [Reader()]  # not a child


@pytest.fixture
def made():
    """A layer whose sums are read by its own norm and, linked, by another module's; both norms patched."""
    made = Layer()
    patch_model(made.norm)
    patch_model(made.reader[0].first)
    link(made, made.reader[0], "first")
    return made.eval()


def fused(made, site, left=None, right=None):
    """Whether a sum was fused; its value is checked."""
    left = torch.randn(2, D) if left is None else left
    right = torch.randn(2, D) if right is None else right
    handover.slot.held = None
    with count_launches() as launches:
        total = add(made, left, right, site)
    torch.testing.assert_close(total, left + right, rtol=0, atol=0)
    assert type(total) is type(left + right)
    assert (handover.slot.held is not None) == bool(launches)
    return bool(launches)


OWN, SEEN, LAST = ("norm", False), ("norm", True), ("", True)


@pytest.mark.parametrize("site", [OWN, SEEN, LAST])
def test_a_sum_is_computed_with_the_norm_that_reads_it(made, site):
    assert fused(made, site)
    with torch.no_grad():
        assert fused(made, site)
    with torch.inference_mode():
        assert fused(made, site) == (site == OWN)  # else nobody could tell that the sum was written to
    with use_backend("reference"):
        for grad in (False, True):
            handover.slot.held = None
            with torch.set_grad_enabled(grad):
                total = add(made, torch.ones(2, D).requires_grad_(grad), torch.ones(2, D), site)
            # A sum that is seen is a node of its own, which plain torch makes as well.
            assert (handover.slot.held is None) == (grad and site != OWN) and total.eq(2.0).all()


def hook(*args):
    return None


NORM_CHANGES = {
    "is not patched": unpatch_model,
    "class has another forward": lambda norm: setattr(type(norm)._hf_rmsnorm_base, "forward", lambda self, x: x),
    "weight is computed": lambda norm: parametrize.register_parametrization(norm, "weight", nn.Identity()),
    "pre-hook": lambda norm: norm.register_forward_pre_hook(hook),
    "hook": lambda norm: norm.register_forward_hook(hook),
    "backward hook": lambda norm: norm.register_full_backward_hook(hook),
    "backward pre-hook": lambda norm: norm.register_full_backward_pre_hook(hook),
    "forward of its own": lambda norm: setattr(norm, "forward", norm.forward),
    "accelerate's hook": lambda norm: setattr(norm, "_hf_hook", object()),
    "no weight": lambda norm: setattr(norm, "weight", None),
    "weight in float64": lambda norm: norm.double(),
    "weight of another size": lambda norm: setattr(norm, "weight", nn.Parameter(torch.ones(D + 1))),
    "no eps": lambda norm: setattr(norm, "eps", -1.0),
}


@pytest.mark.parametrize("site", [OWN, SEEN, LAST])
@pytest.mark.parametrize("change", NORM_CHANGES)
def test_a_norm_that_is_not_run_as_it_was_patched_is_left_apart(made, change, site, monkeypatch):
    if change == "class has another forward":
        monkeypatch.setattr(nn.RMSNorm, "forward", nn.RMSNorm.forward)  # as it is after this test
    NORM_CHANGES[change](made.norm if site[0] else made.reader[0].first)
    assert not fused(made, site)


def test_hooks_of_all_modules_keep_sums_apart(made):
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        assert not fused(made, OWN)
    finally:
        handle.remove()
    assert fused(made, OWN)


def output_capturing_hook(*args):
    return None


output_capturing_hook.__module__ = "transformers.utils.output_capturing"
OWNER_CHANGES = {
    "hook on the layer": lambda made: made.register_forward_hook(hook),
    "pre-hook on the reader": lambda made: made.reader[0].register_forward_pre_hook(hook),
    "accelerate's hook on the reader": lambda made: setattr(made.reader[0], "_hf_hook", object()),
    "the reader's own forward": lambda made: setattr(made.reader[0], "forward", hook),
    "the reader is gone": lambda made: made.reader.clear(),
    "the norm is gone": lambda made: delattr(made.reader[0], "first"),
    "the norm is FSDP's": lambda made: setattr(made.reader[0].first, "_is_fsdp_managed_module", True),
    "checkpointing": lambda made: made.train() and setattr(made, "gradient_checkpointing", True),
}


@pytest.mark.parametrize("change", OWNER_CHANGES)
def test_nothing_is_computed_for_a_module_behind_that_is_managed(made, change):
    OWNER_CHANGES[change](made)
    assert not fused(made, LAST)
    assert fused(made, OWN)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.register_forward_hook(output_capturing_hook),
        lambda made: made.reader[0].register_forward_hook(hook),
        lambda made: setattr(made, "gradient_checkpointing", True),
        lambda made: made.train(),
    ],
    ids=["output_hidden_states", "hook behind the reader", "checkpointing in evaluation", "training"],
)
def test_what_cannot_change_the_norm_behind_does_not_keep_it_apart(made, change):
    change(made)
    assert fused(made, LAST)


def test_nothing_is_computed_behind_under_transforms_and_hooks_of_saved_tensors(made):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not fused(made, LAST) and fused(made, OWN)
    with torch.autograd.forward_ad.dual_level():
        handover.slot.held = None
        total = add(made, torch.ones(2, D), torch.ones(2, D), LAST)
        assert handover.slot.held is None and total.eq(2.0).all()


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of a sum."""


@pytest.mark.parametrize("at", [0, 1])
def test_sums_of_anything_but_plain_tensors_are_torchs(made, at):
    for other in (torch.randn(2, D).as_subclass(Tagged), 2.0):
        operands = [torch.randn(2, D), torch.randn(2, D)]
        operands[at] = other
        assert not fused(made, OWN, *operands)


@pytest.mark.parametrize(
    "left, right",
    [
        (torch.randn(2, D), torch.randn(D)),
        (torch.randn(2, D).half(), torch.randn(2, D).bfloat16()),
        (torch.randn(2, D).double(), torch.randn(2, D)),
        (torch.randn(2, D + 1), torch.randn(2, D + 1)),
    ],
    ids=["broadcast", "float16 and bfloat16", "float64", "of another size"],
)
def test_operands_that_one_launch_does_not_take_are_added_by_torch(made, left, right):
    assert not fused(made, OWN, left, right) and not fused(made, OWN, right, left)


@pytest.mark.parametrize("site", [OWN, SEEN])
@pytest.mark.parametrize("which", ["left", "right", "weight", "none"])
def test_the_operand_alone_that_asks_for_it_has_its_gradient(made, which, site):
    left, right = torch.randn(2, D), torch.randn(2, D)
    made.norm.weight.requires_grad_(which == "weight")
    leaf = {"left": left, "right": right, "weight": made.norm.weight, "none": None}[which]
    if which in ("left", "right"):
        leaf.requires_grad_()

    def run(site):
        total = left + right if site is None else add(made, left, right, site)
        return total, made.norm(total)

    (total, y), (own_total, own_y) = run(site), run(None)
    assert (total.requires_grad, y.requires_grad) == (own_total.requires_grad, own_y.requires_grad)
    if leaf is not None:
        ours, theirs = (torch.autograd.grad(each.square().sum(), leaf)[0] for each in (y, own_y))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_observers_see_the_operands_until_they_leave(made):
    seen = []
    with layer.observing(lambda *what: seen.append(what)):
        fused(made, OWN)
    fused(made, OWN)
    ((module, kind, which, operands),) = seen
    assert (module, kind, which, len(operands)) == (made, "sum", OWN, 2)


@pytest.mark.parametrize("site", [OWN, SEEN, LAST])
def test_a_norm_without_weight_is_computed_with_its_sum(site):
    made = Layer()
    made.norm, made.reader[0].first = (nn.RMSNorm(D, eps=1e-6, elementwise_affine=False) for _ in range(2))
    for norm in (made.norm, made.reader[0].first):
        patch_model(norm)
    link(made, made.reader[0], "first")
    made.eval()
    assert fused(made, site) and fused(made, site, torch.randn(2, D, requires_grad=True))


@pytest.mark.parametrize("site", [OWN, SEEN])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "subclass"])
def test_a_seen_sum_has_its_norm_in_no_graph_where_the_weight_is_a_parameter_of_its_own(made, site, kind):
    if kind == "buffer":
        weight = made.norm.weight.detach()
        del made.norm.weight
        made.norm.register_buffer("weight", weight)
    elif kind == "subclass":
        made.norm.weight = type("Tied", (nn.Parameter,), {})(made.norm.weight.detach())
    right = torch.randn(2, D, requires_grad=True)
    if kind != "subclass" or site == SEEN:
        assert fused(made, site, None, right) == (kind == "parameter" or site == OWN)


@pytest.mark.parametrize("left, right", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32),
                                         (torch.bfloat16, torch.bfloat16)])  # fmt: skip
def test_the_wider_operand_decides_what_torchs_own_norm_takes(left, right):
    made = Layer()
    made.norm = nn.LayerNorm(D)
    patch_model(made.norm)
    operands = torch.randn(2, D).to(left), torch.randn(2, D).to(right)
    assert fused(made, OWN, *operands) == (torch.float32 in (left, right))


def test_plans_are_kept_by_both_operands(made, monkeypatch):
    plans = type(made.norm)._hf_rmsnorm_plans
    plans.clear()
    x = torch.randn(2, 3, D)
    for left, right, count in ((x, x, 1), (x, x.clone(), 1), (x.transpose(0, 1).contiguous().transpose(0, 1), x, 2),
                               (x.bfloat16(), x, 3), (x, x.bfloat16(), 4), (x[:1], x[:1], 5)):  # fmt: skip
        assert fused(made, OWN, left, right) and len(plans) == count
    monkeypatch.setattr(type(plans), "keep", None)  # what is not called
    assert fused(made, OWN, x, x)


def test_while_compiling_sums_are_torchs(made, monkeypatch):
    monkeypatch.setattr(layer, "_is_compiling", lambda: True)
    assert not fused(made, OWN)


X = torch.randn(2, D)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "x, capturing, least, waits",
    [
        (X, False, 2 * D + 1, [False, True, True]), (X, False, 2 * D, [False] * 3), (X, True, 2 * D + 1, [False] * 3),
        (nn.Parameter(X), False, 2**20, [False] * 3), (X.long(), False, 2**20, [False] * 3),
        ((X,), False, 2**20, [False] * 3),
    ],
)  # fmt: skip
def test_a_layer_runs_fused_once_where_the_host_is_waited_for(made, monkeypatch, grad, x, capturing, least, waits):
    monkeypatch.setattr(layer, "_ran_fused", set())
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", least)
    monkeypatch.setattr(layer, "capturing", lambda t: capturing)
    with torch.set_grad_enabled(grad):
        assert [layer.waits_for_host(made, x) for _ in range(3)] == ([waits[-1]] * 3 if grad else waits)


@pytest.mark.parametrize("site", [OWN, LAST])
def test_a_captured_graph_fuses_the_sums_that_ran_fused_before(made, monkeypatch, site):
    type(made.norm)._hf_rmsnorm_plans.clear()
    forget()
    found = []
    for capturing in (True, False, True):
        monkeypatch.setattr(layer, "capturing", lambda t, answer=capturing: answer)
        with torch.no_grad():
            found.append(fused(made, site))
    assert found == [False, True, site == OWN]


def test_other_code_in_the_modules_own_forward_keeps_its_norm_apart(made, monkeypatch):
    monkeypatch.setattr(type(made.norm), "_hf_rmsnorm_code", None)  # what the forward had when it was patched
    assert not fused(made, OWN)


def test_the_reader_of_a_sum_is_the_child_or_the_one_behind(made):
    assert layer.reader_of(made, "norm") is made.norm
    assert layer.reader_of(made, "") is made.reader[0].first
    assert layer.reader_of(made, "other") is None and layer.reader_of(Layer(), "") is None
