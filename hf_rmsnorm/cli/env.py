"""Show where fused kernels run on this machine, whether their results are right there,
and the versions of all packages.
"""

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


def run(args) -> Result:
    from ..ops.backend import interprets, launch_path

    installed = versions()
    names = _device_names()
    devices = [{"name": name, **_tried(device)} for device, name in names.items()]
    launches = launch_path()
    data = {
        "versions": installed,
        "launches": launches,
        "platform": platform.platform(),
        "triton_interpret": interprets(),
        "devices": devices,
    }
    lines = ["{device} ({name}): {reason}".format(**record) for record in devices]
    if any(record["kernels"] for record in devices):
        lines.append(f"launches: {launches}")
    lines += [_checked_line(record, installed) for record in devices]
    lines = [line for line in lines if line]
    lines.append("")
    for name, number in installed.items():
        lines.append(f"{name:<12}  {number or 'not installed'}")
    lines.append(f"{'platform':<12}  {data['platform']}")
    return Result(data, fitted("\n".join(lines)))


def _checked_line(record: dict, installed: dict) -> str:
    """One line to paste into an issue: how many kernels of a device compute the right
    numbers; "" without kernels.
    """
    kernels = record["kernels"]
    if not kernels:
        return ""
    names = ("hf-rmsnorm", "torch", "triton")
    of_versions = ", ".join(f"{name} {installed[name]}" for name in names)
    wrong = [f"{name}: {text}" for name, text in kernels.items() if text]
    count = f"{len(kernels) - len(wrong)} of {len(kernels)} kinds of kernels"
    equal = f"{count} equal to plain PyTorch, forward and backward"
    said = "; ".join([equal, *wrong])
    return f"{record['device']} {record['name']}, {of_versions}: {said}"


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Versions by name, this package's and Python's first; None if a package is not
    installed.
    """
    import torch

    installed = {"hf-rmsnorm": __version__, "python": platform.python_version()}
    installed |= {name: _version(name) for name in packages}
    installed["torch"] = torch.__version__  # with its build
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    if torch.version.hip:
        installed["hip"] = torch.version.hip
    return installed


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # triton has other names too, for example pytorch-triton-rocm
        return None if find_spec(name) is None else import_module(name).__version__


def _device_names() -> dict[str, str]:
    """The CPU and each accelerator: device -> its name."""
    import torch

    names = {"cpu": platform.processor() or platform.machine()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        name_of = getattr(module, "get_device_name", str)
        for index in range(torch.accelerator.device_count()):
            names[f"{accelerator.type}:{index}"] = name_of(index)
    return names


def _tried(device: str) -> dict:
    """`runs_on` a device; ``"compiles"``: whether a kernel does, None if none is
    compiled; and ``"kernels"``: `check_kernels`.
    """
    import torch

    from .. import rms_norm, use_backend
    from ..ops.backend import interprets, runs_on

    record = runs_on(device) | {"compiles": None, "kernels": {}}
    if record["backend"] != "triton":
        return record
    try:
        with use_backend("triton"):
            x = torch.ones(1, 16, device=device)
            rms_norm(x, x[0]).tolist()  # which waits for it
    except RuntimeError as error:
        failure = "; ".join(str(error).splitlines())
        record["reason"] = f"plain PyTorch ({failure})"
        return record | {"backend": "original", "compiles": False}
    from ..ops.self_check import check_kernels

    record["kernels"] = check_kernels(torch.device(device))
    if not interprets():
        record["compiles"] = True
        record["reason"] += "; one was compiled and ran"
    return record
