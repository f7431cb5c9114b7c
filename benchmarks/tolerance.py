"""The gate of benchmarks and tests: as near to float64 as Hugging Face eager is."""

import torch

from hf_rmsnorm.verification import tolerance


def assert_as_accurate(
    fused: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    what: str = "y",
    other_orders: tuple = (),
) -> None:
    """Maximum and RMS error of `fused` at most 1.5 times those of `eager`, plus one ulp
    of max|exact|.

    `other_orders`: for a sum over rows, eager's result with the rows in other orders.
    Which order adds up best is luck, so eager's own error is the largest of them.
    """
    assert fused.shape == exact.shape, (
        f"{what}: shape {tuple(fused.shape)}, expected {tuple(exact.shape)}"
    )
    assert fused.dtype == eager.dtype, (
        f"{what}: {fused.dtype}, eager gives {eager.dtype}"
    )
    if exact.numel() == 0:
        return
    one_ulp = tolerance.ulp(exact.abs().max(), fused.dtype).item()
    errors = {
        "max": lambda t: (t.double() - exact).abs().max().item(),
        "rms": lambda t: (t.double() - exact).square().mean().sqrt().item(),
    }
    for name, error in errors.items():
        ours, theirs = error(fused), max(error(t) for t in (eager, *other_orders))
        assert tolerance.within(ours, theirs, one_ulp), (
            f"{what}: {name} error {ours:.3e} against float64, eager's is {theirs:.3e} and one ulp {one_ulp:.3e}"
        )
