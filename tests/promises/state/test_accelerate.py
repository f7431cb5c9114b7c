"""accelerate's device maps on a patched model and a patch on a dispatched one: the
kernels run, and so do the hooks.
"""

from collections import Counter

import pytest
import tiny_models
import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from tolerance import assert_as_accurate
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

ids = tiny_models.token_ids(1, 4)
# Every way a norm can lie: on the main device, offloaded with its layer, offloaded as
# an entry of its own.
DEVICE_MAPS = {
    "all on one": {"": "cpu"},
    "disk": {
        "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "disk",
        "model.norm": "disk", "lm_head": "cpu",
    },
    "some on disk": {
        "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
        "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk",
    },
}  # fmt: skip
device_maps = pytest.mark.parametrize("where", DEVICE_MAPS)
orders = pytest.mark.parametrize("order", ["patch first", "hooks first"])


def build():
    return tiny_models.build("qwen3")


def offloaded(model):
    return {path for path, norm in tiny_models.norms(model) if norm.weight.is_meta}


@pytest.fixture
def fired(monkeypatch):
    """How often the hook before each module's forward ran, by module."""
    counts, real = Counter(), AlignDevicesHook.pre_forward

    def spy(self, module, *args, **kwargs):
        counts[module] += 1
        return real(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", spy)
    return counts


FUSED = ("post_attention_layernorm", "q_norm", "k_norm")  # with what surrounds them


def assert_fused_and_hooked(model, fired, expected, exact):
    """Norms that no hook loads are fused with what surrounds them; others are called."""
    norms = tiny_models.norms(model)
    hooked = [norm for _, norm in norms if "_hf_hook" in vars(norm)]
    called = set(hooked)
    for path, norm in norms:
        if path.endswith(FUSED) and not norm.weight.is_meta:
            called.discard(norm)
    pairs = sum(path.endswith("q_norm") and not n.weight.is_meta for path, n in norms)
    fired.clear()
    with count_launches() as launches, use_backend("triton"):
        assert_as_accurate(model(ids).logits, expected, exact)
    assert launches["qk_norm_forward"] == pairs
    assert launches["norm_forward"] == len(norms) - 2 * pairs
    assert fired.keys() & {*hooked} == called
    fired.clear()
    with count_launches() as launches, use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert not launches
    assert all(fired[norm] == 1 for norm in hooked)
    fired.clear()
    return hooked


@orders
@device_maps
def test_dispatch_model(where, order, tmp_path, fired):
    model = build()
    exact = build().double()(ids).logits
    expected = model(ids).logits.detach()
    how = {"main_device": "cpu", "offload_dir": tmp_path, "force_hooks": True}
    if order == "patch first":
        patch_model(model, strict=True)
    dispatch_model(model, DEVICE_MAPS[where], **how)
    if order == "hooks first":
        patch_model(model, strict=True)
    # Neither looked at nor moved by the patch: what is on disk is still there, and only
    # there.
    away = offloaded(model)
    assert len(away) == {"all on one": 0, "disk": 9, "some on disk": 4}[where]
    hooked = assert_fused_and_hooked(model, fired, expected, exact)
    assert len(hooked) == 9
    assert offloaded(model) == away

    assert unpatch_model(model) == 9  # beneath the hooks
    with count_launches() as launches:
        assert torch.equal(model(ids).logits, expected)
    assert not launches
    assert all(fired[norm] == 1 for norm in hooked)

    patch_model(model, strict=True)
    remove_hook_from_submodules(model)
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    if not away:  # accelerate leaves what was offloaded on meta
        assert not assert_fused_and_hooked(model, fired, expected, exact)


@pytest.mark.parametrize("load", ["from_pretrained", "load_checkpoint_and_dispatch"])
def test_a_model_loaded_under_a_device_map_with_disk_offload(load, tmp_path, fired):
    plain = build()
    exact = build().double()(ids).logits
    plain.save_pretrained(tmp_path / "model")
    folder = tmp_path / "model"
    offload = str(tmp_path / "offload")
    options = {"device_map": DEVICE_MAPS["disk"], "offload_folder": offload}
    if load == "from_pretrained":
        options["dtype"] = torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        with init_empty_weights():
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config).eval()
        patch_model(model, strict=True)  # before there are any weights
        model = load_checkpoint_and_dispatch(model, folder, **options)
    report = patch_model(model, strict=True)
    assert len(report.swapped) == 9
    assert len(offloaded(model)) == 9
    assert_fused_and_hooked(model, fired, plain(ids).logits.detach(), exact)
