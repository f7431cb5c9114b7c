"""Why a kernel cannot be compiled, built or loaded on a machine, and what to do about
it.
"""

import errno
import re
import subprocess
import sysconfig
from pathlib import Path

import torch

COMPILER = "install a C compiler, gcc for one, or name yours: CC=/path/to/gcc"
HEADERS = "install the headers of Python (python3-dev, or python3-devel), or name another C compiler: CC=/path/to/gcc"
PTXAS = "name the one of a CUDA toolkit, or of Triton's wheel: TRITON_PTXAS_PATH=/path/to/ptxas"
SOURCES = (
    "install hf_rmsnorm with its .py files: Triton compiles kernels from their source"
)
DRIVER = "name the folder of the GPU driver's libcuda.so.1: TRITON_LIBCUDA_PATH=/path/to/folder"
CACHE = "name a folder on a local disk that has space and can be written to: TRITON_CACHE_DIR=/path/to/folder"
UNKNOWN = (
    "see that there are a C compiler (CC=), python3-dev and a folder to write to (TRITON_CACHE_DIR=); "
    "else report it with what `hf-rmsnorm env` prints"
)
# Texts of Triton, and of the programs that it calls, with their cures.
_CURES = (
    # an error about a file, but one that is not found or is no program
    (r"\[Errno (?!2\]|8\])", CACHE),
    (r"Python\.h", HEADERS),
    (r"C compiler|\b(gcc|clang|cc)\b", COMPILER),
    (r"ptxas", PTXAS),
    (r"source code|Python file", SOURCES),
    (r"libcuda", DRIVER),
    (r"\[Errno|cache|shared object", CACHE),
)
# Errors of a driver about its GPU, which any next call gets too; not those about the
# code that it has to load.
_OF_THE_DEVICE = re.compile(
    r"(CUDA|HIP|driver) error|Triton Error \[(?!.*(PTX|image|symbol|function))|out of memory|illegal memory access"
    r"|misaligned address|device-side assert|launch failure|captur",
    re.IGNORECASE,
)
# another try may succeed
_OF_THE_MOMENT = {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
_MOST = 300  # characters of a cause

# The devices where a kernel failed, and the text of the first failure there: no other
# kernel is loaded there.
failed_devices: dict[torch.device, str] = {}
# The same as (type, index), once the backward in which a kernel failed has ended: no
# forward starts a kernel there.
left_devices: dict[tuple[str, int | None], str] = {}


class KernelUnavailable(RuntimeError):
    """A kernel could not be compiled, built or loaded, so nothing has run. Its text is
    the cause, and then the cure.
    """


def unavailable(error: Exception) -> KernelUnavailable:
    """An error of Triton, the compiler or the loader as one line with its cure."""
    cause = _cause(error).rstrip(".")
    return KernelUnavailable(
        f"kernels cannot be compiled here: {cause}\nWhat to do: {_cure(cause)}"
    )


def _cure(cause: str) -> str:
    for pattern, cure in _CURES:
        if re.search(pattern, cause, re.IGNORECASE):
            return cure
    return UNKNOWN


def is_of_the_device(error: Exception) -> bool:
    """Whether an error says something of the device or of the moment, and nothing of a
    kernel to be compiled.
    """
    if isinstance(error, OSError):
        return error.errno in _OF_THE_MOMENT
    if isinstance(error, MemoryError) or type(error).__name__ == "InterpreterError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    return _OF_THE_DEVICE.search(str(error)) is not None


def _cause(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        return _failed_command(error)
    text = str(error).strip().partition("\n")[0]
    if not isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {text}"
    return text[:_MOST]


def _failed_command(error: subprocess.CalledProcessError) -> str:
    command = error.cmd[0]
    cause = f"{command} ended with exit code {error.returncode}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if "ptxas" not in command and not header.exists():
        cause += f": {header} is not there"
    return cause
