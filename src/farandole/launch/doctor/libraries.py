"""Files of CUDA, NCCL and MPI that the dynamic linker finds, as JSON: `python -m farandole.launch.doctor.libraries`.

The module runs in a process of its own, because some libraries cannot be unloaded."""

import contextlib
import ctypes
import json
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# NVIDIA's packages on PyPI keep their libraries in folders that only torch searches.
WHEELS = "nvidia/*/lib"

OLDEST_CUDA = 11000  # the same number as in native/device/cuda_library.h
OLDEST_NCCL = 21800  # the same number as in native/transport/nccl_library.h

LIBRARIES: Mapping[str, Sequence[str]] = {
    "CUDA driver": ("libcuda.so.1",),
    "CUDA runtime": ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"),
    "NCCL": ("libnccl.so.2",),
    "Open MPI": ("libmpi.so.40",),
    "MPICH": ("libmpich.so.12", "libmpi.so.12"),
    "MPI's standard ABI": ("libmpi_abi.so.1", "libmpi_abi.so.0"),
}


def find_libraries() -> dict[str, tuple[str, str]]:
    """Return the file of each library that can be loaded, and its version or the number of its devices."""
    found = {}
    for title, names in LIBRARIES.items():
        for name in names:
            library = _load(name)
            if library is not None:
                about = ABOUT[title](library) if title in ABOUT else ""
                found[title] = (_file_of(name), about)
                break
    return found


def _load(name: str) -> ctypes.CDLL | None:
    wheels = Path(sysconfig.get_path("purelib")).glob(f"{WHEELS}/{name}")
    for path in (name, *map(str, wheels)):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


def _file_of(name: str) -> str:
    """Return the file by which `name` has been loaded into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = [path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith("/")]
    # libcuda.so.1 is a link to libcuda.so.535.54; but libmpi.so.12 is not libmpi.so.40, which may be here, too.
    for beginning in (name, name.partition(".so")[0] + ".so"):
        for path in paths:
            if Path(path).name.startswith(beginning):
                return path
    return name


def _devices(library: ctypes.CDLL) -> str:
    version, count = ctypes.c_int(), ctypes.c_int()
    code = library.cuInit(0)
    if code != 0:
        return f"no device can be used: {_text_of(library, code)}"
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    found = f"CUDA {_spelled(version.value)}, {count.value} devices"
    if version.value >= OLDEST_CUDA:
        return found
    return f"{found}; tensors on GPUs need CUDA {_spelled(OLDEST_CUDA)} or later"


def _spelled(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _text_of(library: ctypes.CDLL, code: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    library.cuGetErrorString(code, ctypes.byref(text))
    return f"{(name.value or b'error').decode()} ({code}), {(text.value or b'without a text').decode()}"


def _version_of_nccl(library: ctypes.CDLL) -> str:
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    number = version.value
    found = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number >= 10000 else f"version {number}"
    if number >= OLDEST_NCCL:
        return found
    return f"{found}; ranks use NCCL from {OLDEST_NCCL // 10000}.{OLDEST_NCCL // 100 % 100} on"


def _version_of_mpi(library: ctypes.CDLL) -> str:
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    return " ".join(text.value.decode(errors="replace").splitlines()[0].partition(",")[0].split())


ABOUT: Mapping[str, Callable[[ctypes.CDLL], str]] = {
    "CUDA driver": _devices,
    "NCCL": _version_of_nccl,
    "Open MPI": _version_of_mpi,
    "MPICH": _version_of_mpi,
    "MPI's standard ABI": _version_of_mpi,
}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # a library may print while it loads
        output.write(json.dumps(find_libraries()))
