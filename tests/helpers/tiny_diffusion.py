"""Tiny random transformers of diffusers, each with adaptive LayerNorms, and what they are called with."""

import torch


def _seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    return model, {
        "hidden_states": _seeded(2, 4, 8, 8),
        "timestep": torch.tensor([3, 5]),
        "class_labels": torch.tensor([1, 2]),
    }


def pixart():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=24, norm_num_groups=2,
    )  # fmt: skip
    return model, {
        "hidden_states": _seeded(2, 4, 8, 8),
        "encoder_hidden_states": _seeded(2, 5, 24),
        "timestep": torch.tensor([3, 5]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": _seeded(2, 16, 4),
        "encoder_hidden_states": _seeded(2, 6, 32),
        "pooled_projections": _seeded(2, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "img_ids": _seeded(16, 3),
        "txt_ids": _seeded(6, 3),
    }


def sd3():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
        qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": _seeded(2, 4, 8, 8),
        "encoder_hidden_states": _seeded(2, 6, 32),
        "pooled_projections": _seeded(2, 64),
        "timestep": torch.tensor([3, 5]),
    }


MODELS = {"DiT": dit, "PixArt": pixart, "Flux": flux, "SD3": sd3}


def build(name: str, dtype: torch.dtype):
    """(model, arguments), seeded, floating arguments in its dtype."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    for module in model.modules():  # as trained ones: their modulations are not nearly zero
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.15)
    fit = {n: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in arguments.items()}
    return model.to(dtype).eval(), fit
