"""The dtypes that a checkpoint stores, and the state dict of a file of `torch.save`,
read without running code.
"""

import pickle
import re
import zipfile
from pathlib import Path

import torch

from .plan import ConversionError

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPES = FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPES |= {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a file of `torch.save`, read without running the code that a
    pickle may bring.
    """
    try:
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
    ) as error:
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            cure = "save the model as safetensors where you trust it"
            raise ConversionError(
                f"{path}: a pickle that runs code ({code[1]}): {cure}"
            ) from None
        raise ConversionError(
            f"{path}: truncated, corrupt or no file of torch.save: download it again"
        ) from None
    items = state.items() if isinstance(state, dict) else [("the file", state)]
    cure = "save the model's state dict alone, or the model by save_pretrained"
    if any(isinstance(value, dict) for _, value in items):
        first = ", ".join(map(str, list(state)[:3]))
        raise ConversionError(f"{path}: a checkpoint of training ({first}): {cure}")
    for name, value in items:
        if (
            not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
            or value.dtype not in CODES
        ):
            kind = (
                value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise ConversionError(f"{path}: {name} is no plain tensor ({kind}): {cure}")
    return state
