"""What users can see of the bindings is what `__all__` says, and changes only on purpose."""

import inspect
from types import ModuleType

import pytest

import farandole.numpy
import farandole.torch

BASICS = """
Adasum Average Compression Handle Max Min ProcessSet Product Sum add_process_set allgather allgather_async
allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast
broadcast_ broadcast_async broadcast_async_ broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built
empty_shared global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async
init is_homogeneous is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built
poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown size
start_timeline stop_timeline synchronize
"""
TORCH = (
    "DistributedOptimizer HorovodInternalError broadcast_optimizer_state broadcast_parameters sparse_allreduce_async"
)

SIGNATURES = {
    "init": "comm=None process_sets=None",
    "allreduce": "tensor average=None name=None compression=None op=None prescale_factor=1.0 postscale_factor=1.0 set",
    "allreduce_async": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 set",
    "allreduce_": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 set",
    "allreduce_async_": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 set",
    "grouped_allreduce_async_": "tensors average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 set",
    "allgather": "tensor name=None set",
    "grouped_allgather": "tensors name=None set",
    "broadcast": "tensor root_rank name=None set",
    "broadcast_async_": "tensor root_rank name=None set",
    "alltoall": "tensor splits=None name=None set",
    "reducescatter": "tensor name=None compression=None op=0 set prescale_factor=1.0 postscale_factor=1.0",
    "reducescatter_async": "tensor name=None op=0 set prescale_factor=1.0 postscale_factor=1.0",
    "grouped_reducescatter": "tensors name=None compression=None op=0 set prescale_factor=1.0 postscale_factor=1.0",
    "broadcast_object": "obj root_rank=0 name=None set",
    "allgather_object": "obj name=None set",
    "poll": "handle",
    "synchronize": "handle",
    "barrier": "set",
    "join": "device=-1",
}


def visible(module: ModuleType) -> set[str]:
    names = {name for name, value in vars(module).items() if not isinstance(value, ModuleType)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("module", "names"), [(farandole.numpy, BASICS), (farandole.torch, BASICS + TORCH)], ids=["numpy", "torch"]
)
def test_public_names(module: ModuleType, names: str) -> None:
    assert list(module.__all__) == sorted(names.split())
    assert visible(module) == set(names.split())


@pytest.mark.parametrize("module", [farandole.numpy, farandole.torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_horovod(module: ModuleType, name: str) -> None:
    parameters = list(inspect.signature(getattr(module, name)).parameters.values())
    spelled = [
        "set"
        if each.name == "process_set"
        else each.name
        if each.default is inspect.Parameter.empty
        else f"{each.name}={each.default}"
        for each in parameters
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert " ".join(spelled) == SIGNATURES[name]


def test_distributed_optimizer_takes_horovods_arguments() -> None:
    assert list(inspect.signature(farandole.torch.DistributedOptimizer).parameters) == [
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        "process_set",
    ]


def test_constants_and_builds() -> None:
    hvd = farandole.torch
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ccl_built(), hvd.ddl_built(), hvd.cuda_built()))
    assert not hvd.rocm_built()
    assert hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="init"):
        hvd.mpi_threads_supported()
