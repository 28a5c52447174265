"""Loader of the stand-in for the CUDA driver, which the engine finds by the driver's name."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build"
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread")
SLOWEST = 200  # microseconds; the longest delay of work in a stream


@cache
def load() -> ctypes.CDLL:
    """Load the library, with two devices, and return it; build it if no test has done so. It stays loaded.

    Skips the test in a process with NVIDIA's driver, which the engine would find by the same name."""
    _require_no_driver()
    library = ctypes.CDLL(str(built("stand_in_cuda", "libcuda.so.1")))
    for name in ("stand_in_stream", "stand_in_default_stream", "stand_in_close"):
        getattr(library, name).restype = ctypes.c_void_p
    library.stand_in_allocate.restype = ctypes.c_uint64
    library.stand_in_allocate.argtypes = [ctypes.c_size_t]
    library.stand_in_free.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    library.stand_in_write.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    library.stand_in_read.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.stand_in_order.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.stand_in_close.argtypes = library.stand_in_open.argtypes = [ctypes.c_void_p]
    library.stand_in_live.restype = library.stand_in_pinned.restype = ctypes.c_size_t
    library.stand_in_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.stand_in_configure(2, 12040, SLOWEST)
    return library


def _require_no_driver() -> None:
    try:
        loaded = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return
    if not hasattr(loaded, "stand_in_configure"):
        pytest.skip("this process has NVIDIA's driver; the stand-in for it needs a process without")


def built(source: str, name: str) -> Path:
    """Return the path of the library made from tests/native/`source`*, with the `name` of NVIDIA's library."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler, c++, builds the stand-ins for NVIDIA's libraries")
    files = sorted((ROOT / "tests" / "native").glob(f"{source}*"))
    sources = [str(file) for file in files if file.suffix == ".cc"]
    options = (*OPTIONS, f"-Wl,-soname,{name}", f"-I{ROOT / 'native'}")
    text = b"".join(file.read_bytes() for file in files) + " ".join(OPTIONS).encode()
    library = BUILD / f"{source}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *options, *sources, "-o", str(fresh)], check=True, timeout=300)
        fresh.rename(library)
    return library
