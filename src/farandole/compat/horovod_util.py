"""The functions of `horovod.common.util` that programs outside Horovod use."""

import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from typing import TypeVar

from farandole.compat.absent import missing_module
from farandole.compat.answers import MODULES
from farandole.core import builds

T = TypeVar("T")


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI has started the ranks."""
    return builds.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return True: ranks communicate without MPI."""
    return builds.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return 0: farandole is not built with NCCL, but opens it at run time."""
    return builds.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return builds.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return builds.ccl_built()


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True: tensors may be on GPUs. The result does not depend on this host's GPUs, as in Horovod."""
    return builds.cuda_built() or builds.rocm_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework `ext_base_name` is installed and farandole has a binding for it."""
    name = f"horovod.{ext_base_name}"
    return name in MODULES and missing_module(name) is None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise `ImportError` if there is no binding `ext_name`, such as "horovod.torch", or its framework is missing."""
    why = missing_module(ext_name) if ext_name in MODULES else "farandole has no binding of this name"
    if why is not None:
        raise ImportError(f"Extension {ext_name} has not been built: {why}")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: bindings are not built for one version of their framework."""


def get_ext_suffix() -> str:
    """Return the suffix of the file names of extension modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path where Horovod would have its extension module. The file does not exist."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  (programs may pass it by name)
    """Cut a list into `n` parts, the first of which may have one item more."""
    size, larger = divmod(len(l), n)
    ends = [part * size + min(part, larger) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Return whether `x` can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare versions such as 1.13.0a1 by their numbers; raises `ValueError` unless `target` has three of them."""
    wanted = target.split(".")
    if len(wanted) != 3 or not all(part.isdigit() for part in wanted):
        raise ValueError(f"target must be written as 1.2.3, got {target!r}")
    numbers = [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", ver)[0])[:3]]  # type: ignore[index]
    return tuple(numbers + [0] * (3 - len(numbers))) >= tuple(int(part) for part in wanted)
