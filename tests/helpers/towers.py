"""Arguments of the configs of one-layer towers: pictures, text and sound."""

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IMAGE = _TOWER | {"image_size": 16, "patch_size": 8}
TEXT = _TOWER | {"vocab_size": 64, "max_position_embeddings": 16}
AUDIO = _TOWER | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 16),
    "conv_kernel": (10, 16),
    "num_conv_pos_embedding_groups": 2,
}
