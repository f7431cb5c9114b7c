"""The commands that measure what a call costs the host."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime, timezone

from hf_rmsnorm.cli.common import CliError, Result, add_device, pick_device

FORMAT = 1


class Host:
    """What a call of a norm, and a decoder layer, cost the host; needs no GPU.

    On a CPU the kernels are compiled for an H100, and the launch itself is left out.
    """

    def add_arguments(self, parser) -> None:
        add_device(parser)

    def run(self, args) -> Result:
        """Measure on the device that is asked for, which becomes the current one."""
        import torch

        from benchmarks import host, tables
        from benchmarks.environment import environment

        device = pick_device(args.device)
        if device.type not in ("cpu", "cuda"):
            raise CliError(f"{device.type} is not measured: pass --device cpu")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        data = {
            "format": FORMAT,
            "bench": "host",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **environment(cuda),
            "dtype": "bfloat16",
        }
        torch.manual_seed(0)
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            data |= host.run(device.type, torch.bfloat16)
        lines = [tables.heading(data), *tables.host(data), *tables.peers(data)]
        lines += [f"not measured here: {reason}" for reason in data["not_measured"]]
        return Result(data, "\n".join(lines))


class Ratios:
    """What the launch path of the installed Triton costs the host; needs no GPU.

    Of a norm in inference and of a LLaMA layer for one token, beside the unpatched model,
    the launches themselves left out: the columns of scripts/versions.py.
    """

    def add_arguments(self, parser) -> None:
        """It has none besides the common ones."""

    def run(self, args) -> Result:
        from benchmarks import host

        reason = host.untimed()
        if reason is not None:
            raise CliError(reason)
        import triton

        data = {"triton": triton.__version__, **host.version_ratios()}
        lines = [f"Triton {triton.__version__}, the host's time without the launch:"]
        for name in ("norm", "layer"):
            figures = "{unpatched:.1f} -> {patched:.1f} us ({ratio:.2f})"
            lines.append(f"  a {name}: {figures.format(**data[name])}")
        return Result(data, "\n".join(lines))
