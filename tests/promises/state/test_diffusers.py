"""diffusers' caches and hooks on a patched transformer, and a patch of a cached one:
as without the patch, fused, and undone in any order.
"""

import functools
import gc

import pytest
import torch

from hf_rmsnorm import count_launches, patch_model, unpatch_model

diffusers = pytest.importorskip(
    "diffusers", reason="the library that this is for, of scripts/requirements"
)
hooks = pytest.importorskip("diffusers.hooks", reason="a diffusers with caches")
helpers = pytest.importorskip(
    "diffusers.hooks._helpers", reason="a diffusers with a table of blocks"
)
models = pytest.importorskip("scripts.coverage.diffusers")

FLUX = "FluxTransformer2DModel"
WAN = "WanTransformer3DModel"
# name -> (model, class of the config, its arguments)
CACHES = {
    "first block": (FLUX, "FirstBlockCacheConfig", {"threshold": 0.2}),
    "mag": (
        FLUX,
        "MagCacheConfig",
        {"num_inference_steps": 4, "mag_ratios": torch.ones(4), "retention_ratio": 0.1},
    ),
    "sea": (WAN, "SeaCacheConfig", {"residual_order": 0}),
    "Taylor": (
        FLUX,
        "TaylorSeerCacheConfig",
        {"cache_interval": 2, "disable_cache_before_step": 1, "max_order": 1},
    ),
}


def build(name):
    model, inputs = models.build(name, torch.bfloat16)
    inputs["return_dict"] = False
    return model, inputs


def config_of(name):
    _, config, arguments = CACHES[name]
    config = getattr(hooks, config, None)
    if config is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no such cache")
    return config(**arguments)


def steps(model, inputs, count=3):
    """The outputs of a few steps with the same inputs."""
    outputs = []
    for at in range(count):
        where = {"step_index": at, "num_inference_steps": 4, "sigma": 0.5}
        with torch.no_grad(), model.cache_context("cond", **where):
            outputs.append(model(**inputs)[0])
    return outputs


def blocks_of(model):
    for name, module in model.named_children():
        if "blocks" in name:
            yield from module


def assert_equal(outputs, expected):
    assert all(map(torch.equal, outputs, expected))


def launches_of(model, inputs, expected):
    """What these outputs take."""
    with count_launches() as launches:
        assert_equal(steps(model, inputs, len(expected)), expected)
    return launches


def patch_and(model, other, first):
    """Both, in an order; all is fused."""
    if first == "other":
        other()
    report = patch_model(model)
    if first == "patch":
        other()
    assert not report.skipped
    assert not any(layer.reason for layer in report.layers)


orders = pytest.mark.parametrize("first", ["patch", "other"])


@orders
@pytest.mark.parametrize("undone_first", ["patch", "cache"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_and_a_patch_in_any_order(name, first, undone_first):
    plain, inputs = build(CACHES[name][0])
    uncached = steps(plain, inputs, 1)
    plain.enable_cache(config_of(name))
    expected = steps(plain, inputs)
    model, _ = build(CACHES[name][0])
    types = list(map(type, model.modules()))

    patch_and(model, lambda: model.enable_cache(config_of(name)), first)
    with count_launches(model) as launches:
        assert_equal(steps(model, inputs), expected)
    assert launches.pieces
    assert all(piece.has_run and not piece.missed for piece in launches.pieces)

    if undone_first == "patch":
        unpatch_model(model)
        model._reset_stateful_cache()
        assert not launches_of(model, inputs, expected)
        model.disable_cache()
    else:
        model.disable_cache()
        assert launches_of(model, inputs, uncached)
        unpatch_model(model)
    assert not launches_of(model, inputs, uncached)
    assert list(map(type, model.modules())) == types


def test_the_table_of_blocks_has_a_fused_class_as_long_as_a_model_has():
    table = helpers.TransformerBlockRegistry
    gc.collect()  # models of other tests
    model, _ = build(FLUX)
    other, _ = build(FLUX)
    expected = [table.get(type(block)) for block in blocks_of(model)]
    classes = [metadata._cls for metadata in expected]
    patch_model(model)
    patch_model(other)
    fused = {type(block) for block in blocks_of(model)}.difference(classes)
    assert fused
    for block, metadata in zip(blocks_of(model), expected, strict=True):
        found = table.get(type(block))
        index = found.return_encoder_hidden_states_index
        assert index == metadata.return_encoder_hidden_states_index
    unpatch_model(model)
    for block in blocks_of(other):
        table.get(type(block))  # an error if it is not there
    block, *_ = blocks_of(other)
    block.__class__ = type("FSDPBlock", (type(block),), {})  # as `fully_shard` does
    unpatch_model(other)
    assert fused.isdisjoint(table._registry)
    assert [metadata._cls for metadata in expected] == classes


OFFLOADS = {
    "blocks": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "leaves": {"offload_type": "leaf_level"},
}


@orders
@pytest.mark.parametrize("kind", OFFLOADS)
def test_group_offloading(kind, first):
    cpu = torch.device("cpu")
    how = {"onload_device": cpu, "offload_device": cpu, **OFFLOADS[kind]}
    offload = functools.partial(hooks.apply_group_offloading, **how)
    plain, inputs = build(FLUX)
    expected = steps(plain, inputs, 1)
    model, _ = build(FLUX)
    patch_and(model, lambda: offload(model), first)
    assert launches_of(model, inputs, expected)
    unpatch_model(model)
    assert not launches_of(model, inputs, expected)
