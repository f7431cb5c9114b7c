"""Versions, devices, and which backend runs on each and why."""

from __future__ import annotations

import os
import platform

from .common import Result


def add_arguments(parser) -> None:
    """`env` takes none of its own."""


def run(args) -> Result:
    import torch

    from benchmarks.environment import versions as installed

    from ..ops.backend import describe_backend

    versions = installed()
    names = [("cpu", platform.processor() or platform.machine())]
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is not None:
        module = torch.get_device_module(present)
        for index in range(torch.accelerator.device_count()):
            names.append((f"{present.type}:{index}", getattr(module, "get_device_name", str)(index)))
    devices = []
    for device, name in names:
        backend, reason = describe_backend(device)
        devices.append({"device": device, "name": name, "backend": backend, "reason": reason})

    data = {
        "versions": versions,
        "platform": platform.platform(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET") == "1",
        "devices": devices,
    }
    width = max(map(len, versions))
    lines = [f"{name:<{width}}  {value or 'not installed'}" for name, value in versions.items()]
    lines += [f"{'platform':<{width}}  {data['platform']}", ""]
    lines += [f"{d['device']} ({d['name']}): backend {d['backend']}, because {d['reason']}" for d in devices]
    return Result(data, "\n".join(lines))
