"""Arguments of the few types that neither config, nor the forward's signature, nor
errors name.

Only this tool knows of these: recognition and kernels do not mention models.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession


def _grid(*sizes: int) -> torch.Tensor:
    """The coordinates of every place of a grid: two examples, (2, places, axes)."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in sizes))
    return places.expand(2, *places.shape).contiguous()


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


def _with_images(tokens: int) -> torch.Tensor:
    """Two examples of `tokens` places for an image, whose id is 100, and eight words."""
    return torch.cat([torch.full((2, tokens), 100), _ids(2, 8)], dim=1)


def _second_frame(model: torch.nn.Module):
    """A video of two frames with an object marked in the first, which the model has
    seen already.
    """
    side = (
        model.config.image_size
        if isinstance(getattr(model.config, "image_size", None), int)
        else 64
    )
    session = Sam2VideoInferenceSession(
        torch.randn(2, 3, side, side), side, side, dtype=model.dtype
    )
    index = session.obj_id_to_idx(1)
    points = {
        "point_coords": torch.full((1, 1, 1, 2), side / 2),
        "point_labels": torch.ones(1, 1, 1, dtype=torch.int),
    }
    session.add_point_inputs(index, 0, points)
    session.obj_with_new_inputs = [1]
    with torch.no_grad():
        model(inference_session=session, frame_idx=0)
    return session


# By type: values of attributes of its config or, as "Class.attribute", of any part's
# config.
CONFIG: dict[str, dict] = json.loads(
    (Path(__file__).resolve().parents[1] / "data/config_hints.json").read_text()
)
# By type: arguments of its forward. A tuple is the shape of random numbers; a function
# gives the value.
INPUTS: dict[str, dict] = {
    "clap": {
        "input_ids": lambda: _ids(2, 12),
        "input_features": (2, 1, 1001, 64),
        "is_longer": lambda: torch.zeros(2, 1, dtype=torch.bool),
    },
    "edgetam": {"pixel_values": (2, 3, 64, 64)},
    "edgetam_vision_model": {"pixel_values": (2, 3, 64, 64)},
    "gemma4_vision": {
        "pixel_values": (2, 16, 192),
        "pixel_position_ids": lambda: _grid(4, 4),
    },
    "idefics": {
        "input_ids": lambda: _ids(2, 12),
        "pixel_values": (2, 1, 3, 32, 32),
        "image_attention_mask": lambda: torch.ones(2, 12, 1, dtype=torch.long),
    },
    "instructblip": {
        "pixel_values": (2, 3, 32, 32),
        "qformer_input_ids": lambda: _ids(2, 12),
        "input_ids": lambda: _with_images(32),
    },
    "instructblipvideo": {
        "pixel_values": (2, 2, 3, 32, 32),
        "qformer_input_ids": lambda: _ids(2, 12),
        "input_ids": lambda: _with_images(64),
    },
    "inkling2_vision": {
        "pixel_values": (4, 16, 16, 3),
        "image_grid_thw": lambda: torch.tensor([[1, 2, 2]]),
    },
    "lxmert": {
        "input_ids": lambda: _ids(2, 12),
        "visual_feats": (2, 6, 64),
        "visual_pos": (2, 6, 4),
    },
    "neucodec": {"input_values": (2, 1, 6400), "input_features": (2, 20, 64)},
    "xcodec2": {"input_values": (2, 1, 6400), "input_features": (2, 40, 64)},
    "omdet-turbo": {
        "pixel_values": (2, 3, 64, 64),
        "classes_input_ids": lambda: _ids(4, 12),
        "classes_attention_mask": lambda: torch.ones(4, 12, dtype=torch.long),
        "tasks_input_ids": lambda: _ids(2, 12),
        "tasks_attention_mask": lambda: torch.ones(2, 12, dtype=torch.long),
        "classes_structure": lambda: torch.tensor([2, 2]),
    },
    "oneformer": {"pixel_values": (2, 3, 64, 64), "task_inputs": lambda: _ids(2, 77)},
    "qwen3_asr_encoder": {
        "input_features": (2, 128, 200),
        "input_features_mask": lambda: torch.ones(2, 200, dtype=torch.long),
    },
    **dict.fromkeys(
        ("edgetam_video", "sam2_video"),
        {"inference_session": _second_frame, "frame_idx": 1},
    ),
    "sam2_hiera_det_model": {"pixel_values": (2, 3, 32, 32)},
    "sam2_vision_model": {"pixel_values": (2, 3, 32, 32)},
    "seggpt": {
        "pixel_values": (2, 3, 32, 32),
        "prompt_pixel_values": (2, 3, 32, 32),
        "prompt_masks": (2, 3, 32, 32),
    },
    "speecht5": {"input_values": (2, 12, 64), "decoder_input_values": (2, 12, 64)},
    "timesfm": {
        "past_values": (2, 512),
        "past_values_padding": lambda: torch.zeros(2, 512, dtype=torch.long),
        "freq": lambda: torch.zeros(2, 1, dtype=torch.long),
    },
    "tvp": {"input_ids": lambda: _ids(1, 12), "pixel_values": (1, 2, 3, 256, 256)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (2, 1, 6400)},
    "video_llama_3_vision": {
        "pixel_values": (16, 192),
        "grid_thw": lambda: torch.tensor([[1, 4, 4]]),
        "merge_sizes": lambda: torch.tensor([2]),
    },
    "voxtral_realtime_text": {"input_ids": lambda: _ids(2, 12), "t_cond": (1, 64)},
}
