"""A config that is narrowed keeps the proportions of its parts."""

from transformers import PhimoeConfig, SegformerConfig, StableLmConfig

from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.shrink import shrunk

TEXT = {"num_hidden_layers": 2, "vocab_size": 96}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "short_factor": [1.0 + i / 8 for i in range(64)],
    "long_factor": [1.0 + i for i in range(64)],
}


def test_lists_of_longrope_are_as_long_as_the_narrow_heads_need():
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 640,
    }
    more = {
        "num_local_experts": 2,
        "max_position_embeddings": 131072,
        "rope_parameters": LONGROPE,
    }
    proxy = make_proxy(PhimoeConfig(**{**TEXT, **sizes, **more}))
    size = proxy.config.hidden_size // 4
    factors = proxy.config.rope_parameters
    assert proxy.factor > 1
    assert len(factors["short_factor"]) == len(factors["long_factor"])
    assert len(factors["long_factor"]) == size // 2
    assert factors["short_factor"] == LONGROPE["short_factor"][:: proxy.factor]


def test_a_model_of_stages_is_narrowed_in_each_of_them():
    config = SegformerConfig()
    proxy = make_proxy(config)
    narrow = [size // proxy.factor for size in config.hidden_sizes]
    assert proxy.factor > 1
    assert [*proxy.config.hidden_sizes] == narrow
    plan = discover(proxy)
    assert any(norm.becomes_rms for norm in plan.norms)


def test_what_is_rotated_of_a_head_stays_whole_pairs():
    """With one channel of five StableLM-3B's proxy had another number of channels."""
    config = StableLmConfig()
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    factors = {factor for factor, _ in shrunk(config)}
    assert factors == {1, 2, 5, 10}, "80 channels, 20 of them rotated"
