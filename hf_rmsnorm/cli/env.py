"""Versions, devices, which backend runs on each and why, and whether a kernel can be compiled there."""

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
    """`env` takes none of its own."""


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Versions by name, Python's and this package's first; None for what is not installed."""
    import torch

    found = {"hf-rmsnorm": __version__, "python": platform.python_version()}
    found |= {name: _version(name) for name in packages} | {"torch": torch.__version__}  # with its build
    if torch.version.cuda or torch.version.hip:
        found["cuda" if torch.version.cuda else "hip"] = torch.version.cuda or torch.version.hip
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # triton goes by other names too, pytorch-triton-rocm is one
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
    """What `runs_on` says of a device, and `compiles`: whether a kernel does, None where that is not to be asked."""
    from ..ops.backend import runs_on

    said = runs_on(device) | {"compiles": None}
    if said["backend"] != "triton":
        return said
    failure = one_kernel(device)
    if failure is not None:
        return said | {"backend": "original", "reason": failure, "compiles": False}
    if os.environ.get("TRITON_INTERPRET") == "1":
        return said
    return said | {"reason": f"{said['reason']}; one was compiled and ran", "compiles": True}


def run(args) -> Result:
    import torch

    installed = versions()
    names = {"cpu": platform.processor() or platform.machine()}
    if (present := torch.accelerator.current_accelerator(check_available=True)) is not None:
        name_of = getattr(torch.get_device_module(present), "get_device_name", str)
        names |= {f"{present.type}:{index}": name_of(index) for index in range(torch.accelerator.device_count())}
    devices = [{"name": name, **_tried(device)} for device, name in names.items()]

    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    data = {"versions": installed, "platform": platform.platform(), "triton_interpret": interprets, "devices": devices}
    width = max(map(len, installed))
    lines = [f"{name:<{width}}  {value or 'not installed'}" for name, value in installed.items()]
    lines += [f"{'platform':<{width}}  {data['platform']}", ""]
    lines += [f"{d['device']} ({d['name']}): backend {d['backend']}, because {d['reason']}" for d in devices]
    return Result(data, fitted("\n".join(lines)))
