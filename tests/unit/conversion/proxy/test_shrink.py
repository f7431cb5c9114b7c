"""A config that is narrowed keeps the proportions of its parts."""

from transformers import PhimoeConfig

from hf_rmsnorm.conversion.proxy.model import make_proxy

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
