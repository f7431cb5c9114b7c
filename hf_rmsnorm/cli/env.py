"""Show where fused kernels run on this machine, whether one compiles there, and the
versions of all packages.
"""

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .. import __version__
from ..paths import fitted
from .common import Result

PACKAGES = ("torch", "triton", "transformers", "accelerate", "safetensors")


def add_arguments(parser) -> None:
    """`env` has no arguments besides the common ones."""


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Versions by name, this package's and Python's first; None if a package is not
    installed.
    """
    import torch

    installed = {"hf-rmsnorm": __version__, "python": platform.python_version()}
    # with its build
    installed |= {name: _version(name) for name in packages} | {
        "torch": torch.__version__
    }
    if torch.version.cuda or torch.version.hip:
        installed["cuda" if torch.version.cuda else "hip"] = (
            torch.version.cuda or torch.version.hip
        )
    return installed


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # triton has other names too, for example pytorch-triton-rocm
        return None if find_spec(name) is None else import_module(name).__version__


def one_kernel(device: str) -> str | None:
    """Why a kernel did not run on a device, or None where it did."""
    import torch

    from .. import rms_norm, use_backend

    try:
        with use_backend("triton"):
            x = torch.ones(1, 16, device=device)
            rms_norm(x, x[0]).tolist()  # which waits for it
    except RuntimeError as error:
        return "; ".join(str(error).splitlines())
    return None


def _tried(device: str) -> dict:
    """`runs_on` a device, and ``"compiles"``: whether a kernel does, None if none is
    compiled.
    """
    from ..ops.backend import runs_on

    record = runs_on(device) | {"compiles": None}
    if record["backend"] != "triton":
        return record
    failure = one_kernel(device)
    if failure is not None:
        return record | {
            "backend": "original",
            "reason": f"plain PyTorch ({failure})",
            "compiles": False,
        }
    if os.environ.get("TRITON_INTERPRET") == "1":
        return record
    return record | {
        "reason": f"{record['reason']}; one was compiled and ran",
        "compiles": True,
    }


def _device_names() -> dict[str, str]:
    """The CPU and each accelerator: device -> its name."""
    import torch

    names = {"cpu": platform.processor() or platform.machine()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return names
    name_of = getattr(torch.get_device_module(accelerator), "get_device_name", str)
    return names | {
        f"{accelerator.type}:{index}": name_of(index)
        for index in range(torch.accelerator.device_count())
    }


def run(args) -> Result:
    installed = versions()
    devices = [
        {"name": name, **_tried(device)} for device, name in _device_names().items()
    ]
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    data = {
        "versions": installed,
        "platform": platform.platform(),
        "triton_interpret": interprets,
        "devices": devices,
    }
    lines = [
        f"{record['device']} ({record['name']}): {record['reason']}"
        for record in devices
    ]
    lines.append("")
    lines += [
        f"{name:<12}  {value or 'not installed'}" for name, value in installed.items()
    ]
    lines.append(f"{'platform':<12}  {data['platform']}")
    return Result(data, fitted("\n".join(lines)))
