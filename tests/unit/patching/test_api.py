"""patch_model, unpatch_model and patched: every norm of real models swapped, everything
else about them untouched.
"""

import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import (
    NormSpec,
    is_patched,
    patch_model,
    patched,
    unpatch_model,
    use_backend,
)

LLAMA = {"rounding": "before_weight"}
GEMMA = {"weight_offset": 1.0}
# What each family's modeling file writes out by hand.
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "phi3": LLAMA,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": {"rounding": "once"},
    "gpt2": {"centered": True, "has_bias": True, "functional": True},
}
# Norms per decoder layer, q/k norms included; each model has one more at its end.
PER_LAYER = {"qwen3": 4, "gemma2": 4, "gemma3_text": 6, "olmo2": 4}


def norm_eps(module):
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_norm_is_swapped_with_its_formula_and_computes_the_same(
    family, dtype, fused_calls
):
    model = tiny_models.build(family, dtype)
    ids = tiny_models.token_ids()
    norms = tiny_models.norms(model)
    before = model(ids).logits
    report = patch_model(model, strict=True)
    assert report.skipped == ()
    assert len(norms) == 2 * PER_LAYER.get(family, 2) + 1
    for record, (path, module) in zip(report.swapped, norms, strict=True):
        formula = {"centered": False, "eps": norm_eps(module), **EXPECTED[family]}
        assert record.path == path
        assert record.formula == NormSpec(**formula)
        assert record.class_name == type(module).__name__
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, before)
    assert len(fused_calls) == len(norms)
    fused_calls.clear()
    unpatch_model(model)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, before)
    assert not fused_calls


def names(cls):
    return cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_patch_and_unpatch_keep_everything_but_the_class(family, tmp_path):
    model = tiny_models.build(family, torch.bfloat16)
    norms = tiny_models.norms(model)
    before = []
    for module in model.modules():
        before.append((module, type(module), dict(vars(module))))
    text = repr(model)
    model.save_pretrained(tmp_path / "before")

    patch_model(model)
    assert repr(model).replace(" [hf_rmsnorm]", "") == text
    for module, cls, attributes in before:
        assert isinstance(module, cls)
        assert names(type(module)) == names(cls)
        assert vars(module) == attributes
    model.save_pretrained(tmp_path / "patched")
    assert contents(tmp_path / "patched") == contents(tmp_path / "before")

    assert unpatch_model(model) == len(norms)
    for module, cls, attributes in before:
        assert type(module) is cls
        assert vars(module) == attributes
    assert unpatch_model(model) == 0


def test_a_patched_norm_says_so():
    model = tiny_models.build("llama")
    norm = model.model.norm
    assert not is_patched(model)
    patch_model(model, include="model.layers.0.*")
    assert is_patched(model.model.layers[0])
    assert is_patched(model)
    assert not is_patched(norm)
    patch_model(model)
    assert is_patched(norm)
    assert repr(norm) == f"LlamaRMSNorm({norm.extra_repr()}) [hf_rmsnorm]"
    unpatch_model(model)
    assert not is_patched(model)
    with pytest.raises(TypeError, match="is_patched needs a torch.nn.Module, got str"):
        is_patched("model")


def test_patching_twice_changes_nothing_and_reports_the_same():
    model = tiny_models.build("qwen3")
    first = patch_model(model)
    types = [type(module) for module in model.modules()]
    assert patch_model(model) == first
    assert [type(module) for module in model.modules()] == types
    unpatch_model(model)
    assert patch_model(model) == first


def test_a_report_on_a_patched_model_gives_the_eps_in_force():
    model = nn.Sequential(LlamaRMSNorm(8), LlamaRMSNorm(8))
    patch_model(model)
    model[0].variance_epsilon = 0.25
    model[1].variance_epsilon = -1.0
    report = patch_model(model)
    assert [record.formula.eps for record in report.swapped] == [0.25]
    assert "-1.0" in report.skipped[0].reason


def test_only_this_model_is_patched():
    model = tiny_models.build("llama")
    other = tiny_models.build("llama")
    namespace = dict(vars(LlamaRMSNorm))
    torch_namespace = dict(vars(nn.LayerNorm))
    patch_model(model)
    assert vars(LlamaRMSNorm) == namespace
    assert vars(nn.LayerNorm) == torch_namespace
    assert type(other.model.norm) is LlamaRMSNorm
    assert type(LlamaRMSNorm(8)) is LlamaRMSNorm


def test_patched_undoes_itself_on_exceptions_and_keeps_earlier_patches():
    model = tiny_models.build("llama")
    patch_model(model, include="model.norm")
    types = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="stop"), patched(model) as report:
        assert len(report.swapped) == 5
        assert type(model.model.layers[0].input_layernorm) is not LlamaRMSNorm
        raise RuntimeError("stop")
    assert [type(module) for module in model.modules()] == types
    assert type(model.model.norm) is not LlamaRMSNorm


def test_include_and_exclude():
    model = tiny_models.build("qwen3")
    report = patch_model(
        model, include=["*_norm", "model.norm"], exclude="model.layers.1.*"
    )
    assert [r.path for r in report.swapped] == [
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.self_attn.k_norm",
        "model.norm",
    ]
    reasons = {record.path: record.reason for record in report.skipped}
    assert reasons["model.layers.0.input_layernorm"] == "not in include"
    assert "model.layers.1.*" in reasons["model.layers.1.self_attn.q_norm"]
    assert len(report.swapped) + len(report.skipped) == len(tiny_models.norms(model))


def broken(how):
    """(a patched norm, an input), one of which the formula does not cover."""
    norm = LlamaRMSNorm(8)
    x = torch.randn(2, 8)
    patch_model(norm)
    if how == "integers":
        x = torch.arange(16).view(2, 8)
    elif how == "missing":
        del norm.weight
    elif how == "none":
        norm.weight = None
    elif how == "empty":
        norm.weight = nn.Parameter(torch.empty(0))
    else:
        norm.to("meta")
    return norm, x


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("how", ["integers", "missing", "none", "empty", "meta"])
def test_calls_the_formula_does_not_cover_go_to_the_original(how, backend, fused_calls):
    norm, x = broken(how)
    with use_backend(backend):
        try:
            expected = LlamaRMSNorm.forward(norm, x)
        except Exception as error:
            with pytest.raises(type(error)):
                norm(x)
        else:
            assert torch.equal(norm(x), expected)
    assert not fused_calls


def test_strict_accepts_a_model_all_of_whose_norms_are_swapped_or_excluded():
    model = nn.ModuleDict({"a": LlamaRMSNorm(8), "b": nn.LayerNorm((2, 4))})
    with pytest.raises(ValueError, match="'b'"):
        patch_model(model, strict=True)
    assert type(model["a"]) is LlamaRMSNorm
    report = patch_model(model, exclude="b", strict=True)
    assert [record.path for record in report.swapped] == ["a"]


def swapped(report):
    return {record.path for record in report.swapped}


def kept_output(report):
    kept = set()
    for record in report.swapped:
        if "keeps its output" in record.notes:
            kept.add(record.path)
    return kept


def sums(report):
    return {layer.fused for layer in report.layers if layer.fused.startswith("+")}


def test_a_second_call_keeps_the_options_that_it_does_not_name():
    model = tiny_models.build("llama")
    options = {"memory_efficient": True, "fuse_residual": False}
    alone = patch_model(model, **options)
    assert len(kept_output(alone)) == 5
    assert not alone.layers
    assert patch_model(model) == alone
    fused = patch_model(model, fuse_residual=True)
    assert fused.layers
    assert fused.swapped == alone.swapped
    with patched(model, memory_efficient=False) as report:
        assert not kept_output(report)
    assert patch_model(model) == fused
    plain = patch_model(model, memory_efficient=False)
    assert not kept_output(plain)
    assert plain.layers == fused.layers


def test_a_second_call_changes_only_the_norms_that_it_names():
    model = tiny_models.build("qwen3")
    heads = swapped(patch_model(model, include="*.[qk]_norm"))
    assert len(heads) == 4
    report = patch_model(model, include="model.norm", memory_efficient=True)
    assert swapped(report) == heads | {"model.norm"}
    assert kept_output(report) == {"model.norm"}
    report = patch_model(model, include="*.input_layernorm", fuse_residual=False)
    assert not sums(report)
    report = patch_model(model, include="*.post_attention_layernorm")
    assert sums(report) == {"+ post_attention_layernorm"}
    assert kept_output(patch_model(model)) == {"model.norm"}, "new: the defaults"


def test_a_second_call_returns_what_it_excludes_to_the_original():
    model = tiny_models.build("qwen3")
    types = [type(module) for module in model.modules()]
    everything = patch_model(model)
    with patched(model, exclude="*") as nothing:
        assert [type(module) for module in model.modules()] == types
        assert not nothing.swapped
        assert nothing.skipped[0].reason == "excluded by '*'"
    assert patch_model(model) == everything
    report = patch_model(model, include="model.norm", exclude="*.q_norm")
    assert len(report.swapped) == 7
    attention = model.model.layers[0].self_attn
    assert not is_patched(attention.q_norm)
    fused = {layer.fused for layer in report.layers}
    assert "apply_rotary_pos_emb in one launch" in fused, "its norms are called"
    unpatch_model(model)
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize(
    ("flag", "value"),
    [("strict", None), ("fuse_residual", "False"), ("memory_efficient", 3)],
)
def test_a_flag_that_is_no_bool_is_refused(flag, value):
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=f"{flag} is {value!r}: pass True or False"):
        patch_model(model, **{flag: value})
    assert type(model[0]) is nn.LayerNorm


def test_modules_without_parameters_yet_are_left_alone():
    model = nn.Sequential(nn.LazyLinear(16), nn.LayerNorm(16))
    report = patch_model(model)
    assert swapped(report) == {"1"}
    assert model(torch.ones(2, 8)).shape == (2, 16)
