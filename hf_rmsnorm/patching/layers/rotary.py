"""Which functions are rotary embeddings that launches may compute."""

from collections.abc import Callable
from types import FunctionType

import torch

from ...fused.rotary import PAIR, RotaryCall, RotaryCase, find, rotary_proofs
from .rotary_code import read

_HEAD_DIM = 64


def may_be_rotary(function: Callable | None, called: RotaryCall = PAIR) -> bool:
    """Whether a function that is called so rotates in bfloat16 as launches do, with
    tables of all columns or of half of them.

    Its `RotaryProof` is noted for the calls: each finds out by it whether the function
    rotates such tensors.
    """
    if type(function) is not FunctionType:
        return False
    proof = rotary_proofs.get(function)
    if proof is None or not proof.still_holds():
        proof = read(function)
        if proof is None:
            return False
        rotary_proofs[function] = proof
    dtypes = torch.bfloat16, torch.bfloat16
    for columns in (_HEAD_DIM, _HEAD_DIM // 2):
        case = RotaryCase(called, _HEAD_DIM, columns, *dtypes, torch.device("cpu"))
        if find(proof, function, case) is not None:
            return True
    return False
