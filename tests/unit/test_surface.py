"""What users can see of the bindings is what `__all__` says, and changes only on purpose."""

import importlib
import inspect
import re
from types import ModuleType

import pytest

import farandole.numpy
from farandole.compat.interface import INTERFACE, Entry, read_interface
from farandole.core import public

BASICS = """
Adasum Average Compression Handle Max Min ProcessSet Product Sum add_process_set allgather allgather_async
allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier bind broadcast
broadcast_ broadcast_async broadcast_async_ broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built
empty_shared global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async
init is_homogeneous is_initialized join local_rank local_size metrics mpi_built mpi_enabled mpi_threads_supported
nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown size start_timeline
stop_timeline sycl_built synchronize
"""
TORCH = (
    "DiLoCo DistributedOptimizer HorovodInternalError LocalSGD PowerSGD SyncBatchNorm broadcast_optimizer_state "
    "broadcast_parameters convert_sync_batchnorm elastic sparse_allreduce_async"
)
TENSORFLOW = """
BroadcastGlobalVariablesHook DistributedGradientTape DistributedOptimizer HorovodInternalError
PartialDistributedGradientTape SyncBatchNormalization broadcast_global_variables broadcast_object_fn broadcast_variables
elastic local_rank_op local_size_op process_set_included_op rank_op size_op
"""
# TensorFlow waits by itself, and shares no memory of ours.
NOT_IN_TENSORFLOW = {"Handle", "bind", "empty_shared", "poll", "synchronize"}

OPERATIONS = [
    entry
    for entry in read_interface(INTERFACE.read_text(encoding="utf-8"))
    if entry.module == "horovod.torch" and entry.name in BASICS.split() and entry.arguments is not None
]


def visible(module: ModuleType) -> set[str]:
    names = {
        name for name, value in vars(module).items() if not isinstance(value, ModuleType) or name in module.__all__
    }
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(("framework", "names"), [("numpy", BASICS), ("torch", BASICS + TORCH)], ids=["numpy", "torch"])
def test_public_names(framework: str, names: str) -> None:
    pytest.importorskip(framework)
    module = importlib.import_module(f"farandole.{framework}")
    assert sorted(module.__all__) == sorted(names.split())
    assert visible(module) == set(names.split())


@pytest.mark.usefixtures("frameworks")
def test_public_names_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    module = importlib.import_module("farandole.tensorflow")
    basics = {name for name in BASICS.split() if not re.search(r"_async_?$|(reduce)_$", name)} - NOT_IN_TENSORFLOW
    assert sorted(module.__all__) == sorted({*basics, *TENSORFLOW.split()})
    assert visible(module) == set(module.__all__)


@pytest.mark.parametrize("framework", ["jax", "keras", "numpy", "tensorflow", "torch"])
@pytest.mark.usefixtures("frameworks")
def test_bindings_share_the_public_names_of_the_core(framework: str) -> None:
    pytest.importorskip(framework)
    module = importlib.import_module(f"farandole.{framework}")
    assert set(public.__all__) <= set(module.__all__)
    assert all(getattr(module, name) is getattr(public, name) for name in public.__all__)


@pytest.mark.parametrize("entry", OPERATIONS, ids=lambda entry: entry.name)
def test_arguments_are_those_of_horovod_without_compat_too(entry: Entry) -> None:
    pytest.importorskip("torch")
    ours = inspect.signature(getattr(farandole.numpy, entry.name))
    assert ours == inspect.signature(getattr(importlib.import_module("farandole.torch"), entry.name))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_constants_and_builds(framework: str) -> None:
    pytest.importorskip(framework)
    hvd = importlib.import_module(f"farandole.{framework}")
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ccl_built(), hvd.ddl_built()))
    assert hvd.cuda_built() is True  # tensors on GPUs are taken
    assert not hvd.rocm_built()
    assert not hvd.sycl_built()
    assert hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="init"):
        hvd.mpi_threads_supported()
