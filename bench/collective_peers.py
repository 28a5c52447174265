"""Collectives of Intel MPI, oneCCL and DeepSpeed, which `bench/allreduce.py` compares with farandole's.

    python bench/collective_peers.py

Installs them into `build/collectives`, 2 GB, and compiles what Python needs to call oneCCL and DeepSpeed's kernel for
ranks of one host. `bench/allreduce.py` then has one more job, below Intel MPI's launcher, with all of them beside
farandole."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from farandole.meeting.rendezvous import Rendezvous

PLACE = Path(__file__).resolve().parents[1] / "build" / "collectives"
PACKAGES = ("impi-rt==2021.18.1", "oneccl==2022.1.2", "oneccl-devel==2022.1.2")
DEEPSPEED = "deepspeed==0.19.8"  # only its sources are used
LAUNCHER = PLACE / "bin" / "mpiexec.hydra"
ONECCL, KERNEL = "oneCCL", "DeepSpeed's kernel"
ONECCL_LIBRARY = PLACE / "oneccl_sum.so"
KERNEL_LIBRARY = PLACE / "deepspeed_sum.so"
PATIENCE = timedelta(minutes=1)
# By default oneCCL works in a thread per rank, which the ranks' own threads keep from the cores: a sum of 4 bytes took
# 8 ms on two cores. In the calling threads it took 6 us.
ENVIRONMENT = {
    "MPI4PY_MPIABI": "mpich",
    "LD_LIBRARY_PATH": str(PLACE / "lib"),
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_ATL_SHM": "1",
}

Sum = Callable[[torch.Tensor], Callable[[], object]]


def connect(meeting: Rendezvous) -> dict[str, Sum]:
    """Connect the ranks by each library that is installed. Return functions that make a sum in place of a float32
    tensor. Blocks until all ranks take part."""
    sums = {}
    if ONECCL_LIBRARY.exists():
        sums[ONECCL] = _connect_oneccl(meeting)
    if KERNEL_LIBRARY.exists():
        sums[KERNEL] = _connect_kernel(meeting)
    return sums


def _connect_oneccl(meeting: Rendezvous) -> Sum:
    library = ctypes.CDLL(str(ONECCL_LIBRARY))
    library.address_size.restype = ctypes.c_size_t
    library.sum.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = ctypes.create_string_buffer(library.address_size())
    if meeting.rank == 0:
        library.make_store(address)
    address.raw = meeting.allgather(address.raw, timeout=PATIENCE)[0]
    library.join(address, meeting.size, meeting.rank)

    def make(tensor: torch.Tensor) -> Callable[[], object]:
        where, count = tensor.data_ptr(), tensor.numel()
        return lambda: library.sum(where, count)

    return make


def _connect_kernel(meeting: Rendezvous) -> Sum:
    spec = importlib.util.spec_from_file_location(KERNEL_LIBRARY.stem, KERNEL_LIBRARY)
    assert spec is not None and spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)  # registers the operator below torch.ops.deepspeed
    # The kernel uses shared memory only if all ranks are local, and names it by address and port.
    one = meeting.allgather(str(os.getpid()).encode(), timeout=PATIENCE)[0].decode()
    os.environ |= {"LOCAL_SIZE": str(meeting.size), "MASTER_ADDR": "bench", "MASTER_PORT": one}
    kernel.initialize(meeting.size, meeting.rank)
    reduce = torch.ops.deepspeed.inference_all_reduce_
    return lambda tensor: lambda: reduce(tensor)


def main() -> None:
    """Install and compile."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-warn-script-location"]
    sources = PLACE / "deepspeed"
    subprocess.run([*pip, "--prefix", str(PLACE), *PACKAGES], check=True, timeout=1800)
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", str(sources), DEEPSPEED], check=True, timeout=600)
    here = Path(__file__).parent / "programs" / "oneccl_sum.cc"
    _compile(ONECCL_LIBRARY, [here], [PLACE / "include"], "-L", str(PLACE / "lib"), "-lccl")
    from torch.utils import cpp_extension

    kernel = sources / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    libraries = cpp_extension.library_paths()
    _compile(
        KERNEL_LIBRARY,
        [kernel / "shm.cpp", kernel / "shm_interface.cpp"],
        [Path(each) for each in (sysconfig.get_path("include"), *cpp_extension.include_paths())],
        f"-DTORCH_EXTENSION_NAME={KERNEL_LIBRARY.stem}",
        "-march=native",
        "-fopenmp",
        *(f"-L{each}" for each in libraries),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    )


def _compile(library: Path, sources: list[Path], folders: list[Path], *more: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    include = [word for folder in folders for word in ("-isystem", str(folder))]
    words = [compiler, "-std=c++20", "-O3", "-w", "-shared", "-fPIC", *map(str, sources), *include, *more]
    subprocess.run([*words, "-o", str(library)], check=True, timeout=600)


if __name__ == "__main__":
    main()
