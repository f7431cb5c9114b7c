"""Which layers are recognised as adding what their norms read, and that looking changes nothing."""

import contextlib
import types

import pytest
import torch
from fusion_models import BOTH, Block, build, fused, row
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rmsnorm import patch_model, patched, use_backend
from hf_rmsnorm.ops import backend as backend_module
from hf_rmsnorm.patching.layers import links as chain
from hf_rmsnorm.patching.layers import sums as dataflow


def test_patching_changes_nothing_that_a_forward_changes():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.mix, self.seen = nn.Linear(8, 8), []
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.seen.append(len(x))
            self.mean.mul_(0.9)
            x = x + self.mix(self.n1(x))
            return x + self.mix(self.n2(x))

    model = nn.Sequential(Layer(), Layer())
    with torch.no_grad():
        model[0].mean.fill_(1)
    report = patch_model(model)
    assert "changes what the layer holds" in report.layers[0].reason
    assert model[0].seen == [] and bool((model[0].mean == 1).all())


def test_auto_config_of_many_types_is_recognised_by_its_source():
    """Other words for the same: dropout in the sum, a multiplier, a tuple returned, modules of other names."""
    small = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    for model_type in ("granite", "starcoder2", "cohere2", "smollm3", "olmo3", "glm4", "stablelm", "ernie4_5"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small)).eval()
        ids = torch.arange(3, 19)[None]
        with torch.no_grad(), use_backend("reference"):
            expected = model(ids).logits
            layers = [layer for layer in patch_model(model).layers if layer.class_name.endswith("DecoderLayer")]
            assert layers[-1].fused and (layers[0].fused or model_type == "olmo3"), model_type
            assert torch.equal(model(ids).logits, expected), model_type


class WritesWithAugmented(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        h += 1
        return h + self.b(self.n2(h))


class WritesThroughAView(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        h.view(-1)[0] = 7.0
        return h + self.b(self.n2(h))


class WritesTheResult(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        h = h + self.b(self.n2(h))
        return h.mul_(0.5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("cls", [WritesWithAugmented, WritesThroughAView, WritesTheResult])
def test_a_sum_that_is_written_to_before_a_norm_reads_it(cls, mode):
    """Under inference_mode tensors have no version that would tell."""
    model, x = row(cls(), cls()), torch.randn(2, 5, 32)
    found = []
    for backend in ("reference", "triton"):
        for fuse_residual in (False, True):
            patch_model(model, fuse_residual=fuse_residual)
            with mode(), use_backend(backend):
                found.append(model(x))
        assert torch.equal(*found[-2:])


def halve_the_gradient(h):
    if h.requires_grad:
        h.register_hook(lambda grad: 0.5 * grad)


class HangsAHookOnTheSum(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        if h.requires_grad:
            h.register_hook(lambda grad: 0.5 * grad)
        return h + self.b(self.n2(h))


class HangsItAfterTheNorm(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.n2(h)
        if h.requires_grad:
            h.register_hook(lambda grad: 0.5 * grad)
        return h + self.b(y)


class HasAHookHung(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        halve_the_gradient(h)
        return h + self.b(self.n2(h))


@pytest.mark.parametrize("cls", [HangsAHookOnTheSum, HangsItAfterTheNorm, HasAHookHung])
def test_a_hook_on_a_sum_inside_a_layer_sees_the_whole_gradient(cls):
    model, gradients = row(cls(), cls()), []
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        model.zero_grad()
        with use_backend("triton"):
            model(torch.ones(2, 5, 32)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a)


class CallsASumByAnotherSelf(Block):
    def forward(self, x):
        add = lambda self, y: self + y  # noqa: E731
        h = add(x, self.a(self.n1(x)))
        return h + self.b(self.n2(h))


class BranchesOnItsConfig(Block):
    def __init__(self, parallel):
        super().__init__()
        self.config = types.SimpleNamespace(parallel=parallel)

    def forward(self, x):
        if self.config.parallel:
            return x + (self.a(self.n1(x)) + self.b(self.n2(x)))
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))


class BranchesOnItsNumber(Block):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x):
        if self.layer_idx == 0:
            return self.n2(x) * 2
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))


class HasTensorsOfItsOwn(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        h = x + self.a(self.n1(x)) * self.scale + self.shift
        return h + self.b(self.n2(h))


INSIDE = ["+ n2, + the norm behind it", "+ n2"]


def test_what_is_said_of_each_layer_is_true_of_it():
    both = row(BranchesOnItsConfig(True), BranchesOnItsConfig(True))
    unread = "no patched norm is known to read the sum that it returns"
    assert fused(patch_model(both)) == ["+ the norm behind it", unread]
    assert fused(patch_model(row(BranchesOnItsConfig(False), BranchesOnItsConfig(False))))[-1] == INSIDE[1]
    first, second = patch_model(row(BranchesOnItsNumber(0), BranchesOnItsNumber(1))).layers
    assert (first.path, first.fused, first.reason) == ("0", "", "no norm reads a sum of its forward as it is")
    assert (second.path, second.fused) == ("1", INSIDE[1])
    assert "fails" in fused(patch_model(row(CallsASumByAnotherSelf(), CallsASumByAnotherSelf())))[0]


class BranchesInAHelper(Block):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def join(self, h, y):
        return h - y if self.layer_idx % 2 else y

    def forward(self, x):
        h = self.join(x, x + self.a(self.n1(x)))
        return h + self.b(self.n2(h))


def test_layers_that_differ_in_what_a_helper_reads():
    layers = patch_model(row(*map(BranchesInAHelper, range(4)))).layers
    assert ["+ n2" in layer.fused for layer in layers] == [True, False, True, False]


RUNS = []


class KeepsItsNumberForACache(Block):
    """As an attention or a mixer does: what it is fused to does not depend on it."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx, self.layer_type = layer_idx, f"type {layer_idx}"

    def forward(self, x, cache=None):
        RUNS.append(self.n1)
        h = x + self.a(self.n1(x))
        if cache is not None:
            h = cache.update(h, self.layer_idx, self.layer_type)
        return h + self.b(self.n2(h))


def test_alike_layers_are_learned_once_whatever_their_numbers(monkeypatch):
    runs = {}
    for count in (2, 9):
        monkeypatch.setattr(dataflow, "_cache", {})
        RUNS.clear()
        report = patch_model(row(*map(KeepsItsNumberForACache, range(count))))
        assert all("+ n2" in layer.fused for layer in report.layers) and len(report.layers) == count
        runs[count] = len(RUNS)
    assert runs[2] == runs[9] > 0


def shared_heads(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm = layer.self_attn.q_norm


def shared_in_a_layer(model):
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm


def shared_by_all_layers(model):
    for layer in model.model.layers:
        layer.input_layernorm = model.model.layers[0].input_layernorm


QK = "q_norm, k_norm, apply_rotary_pos_emb in one launch"


@pytest.mark.parametrize(
    ("share", "paths", "layer", "attention"),
    [
        (shared_heads, 2, BOTH, "its q_norm and k_norm are one norm"),
        (shared_in_a_layer, 2, "its input_layernorm and post_attention_layernorm are one norm", QK),
        (shared_by_all_layers, 3, BOTH, QK),
    ],
)
def test_a_norm_in_several_places_is_said_to_be_one(share, paths, layer, attention):
    model = build("qwen3")
    share(model)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad(), use_backend("reference"):
        expected = model(ids).logits
        report = patch_model(model)
        assert torch.equal(model(ids).logits, expected)
    assert [record.fused or record.reason.partition(":")[0] for record in report.layers] == [layer, attention] * 3
    shared = [record for record in report.swapped if f"one module at {paths} paths" in record.notes]
    assert len(shared) == (3 if share is shared_by_all_layers else 6)


def test_a_layer_whose_tensors_are_elsewhere_is_recognised():
    with torch.device("meta"):
        model = nn.Sequential(HasTensorsOfItsOwn(), HasTensorsOfItsOwn(), nn.RMSNorm(32))
    assert fused(patch_model(model)) == INSIDE


@contextlib.contextmanager
def kernels_that_do_not_serve_the_cpu():
    """As on a GPU, where the layers are recognised on the CPU."""
    real = backend_module.refusal
    with pytest.MonkeyPatch.context() as patch, use_backend("triton"):
        patch.setattr(backend_module, "refusal", lambda x, *a: "no" if x.device.type == "cpu" else real(x, *a))
        yield


CONTEXTS = {
    "a default device": lambda: torch.device("meta"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "kernels for GPUs": kernels_that_do_not_serve_the_cpu,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_layers_are_recognised_whatever_context_the_caller_is_in(name, monkeypatch):
    monkeypatch.setattr(dataflow, "_cache", {})
    model = build("qwen3")
    with CONTEXTS[name]():
        found = fused(patch_model(model))
    assert found == [BOTH, "q_norm, k_norm, apply_rotary_pos_emb in one launch"] * 3


class DrawsAndReachesInside(Block):
    def forward(self, x):
        torch.rand(())
        h = x + self.a.inside(self.a(self.n1(x)))
        return h + self.b(self.n2(h))


def test_looking_draws_no_random_numbers_and_calls_no_hook():
    model, calls = row(DrawsAndReachesInside(), DrawsAndReachesInside()), []
    for layer in model[:2]:
        layer.a.inside = nn.Linear(32, 32)
        layer.a.inside.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    assert fused(patch_model(model)) == INSIDE
    assert torch.equal(torch.get_rng_state(), state) and not calls


def test_a_layer_that_cannot_be_examined_has_its_norms_swapped(monkeypatch):
    monkeypatch.setattr(dataflow, "forward_source", lambda cls: 1 / 0)
    monkeypatch.setattr(dataflow, "_cache", {})
    report = patch_model(build("llama"))
    assert len(report.swapped) == 7
    assert fused(report) == ["it could not be examined: ZeroDivisionError: division by zero"] * 3


def test_a_second_patch_sees_the_norms_swapped_since_and_undoes_no_more():
    model = build("llama")
    assert fused(patch_model(model, exclude="*post_attention*")) == ["+ the norm behind it"] * 3
    with patched(model) as report:
        assert fused(report) == [BOTH] * 3
    model.model.layers[1].forward = lambda *args, **kwargs: None
    report = patch_model(model)
    assert fused(report)[0] == "+ post_attention_layernorm" and "replaced on the instance" in fused(report)[1]


def test_an_interrupted_patch_is_undone(monkeypatch):
    model = build("llama")
    types_before = [type(module) for module in model.modules()]
    calls = []

    def link(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chain, "link", link)
    with pytest.raises(KeyboardInterrupt):
        patch_model(model)
    assert [type(module) for module in model.modules()] == types_before
