"""Loader for the shared library with the XLA custom call."""

import ctypes
import functools

import jax

from farandole.core.plugins import core_table, plugin_path

TARGET = "farandole_collective"


@functools.cache
def register() -> str:
    """Register the custom call for CPU devices and for CUDA at the first call, and return its name.

    Raises `ImportError` if the library is missing or comes from another build."""
    path = plugin_path("jax")
    if not path.exists():
        raise ImportError(f"farandole was built without its JAX plugin: there is no {path}")
    library = ctypes.CDLL(str(path))
    connect = library.farandole_jax_connect
    connect.argtypes, connect.restype = [ctypes.c_void_p], ctypes.c_char_p
    problem = connect(core_table())
    if problem is not None:
        raise ImportError(f"{path} cannot be used: {problem.decode()}")
    for platform, function in (
        ("cpu", library.farandole_jax_collective),
        ("CUDA", library.farandole_jax_collective_on_cuda),
    ):
        target = jax.ffi.pycapsule(function)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(TARGET, target, platform=platform)
    return TARGET
