"""What programs call, as Horovod 0.28.1 has it: names, order of arguments, defaults."""

import importlib
import inspect
from collections.abc import Iterator

import pytest

from farandole.compat import install, uninstall

pytest.importorskip("torch")

# One function or class a line. A name that this version lacks must say so; one that is there must take these arguments
# in this order with these defaults, and may take more behind them. `=...` is the global set, or no compression.
TABLE = """
horovod
run(func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, \
cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None, \
ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, \
mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None)

horovod.runner
run(func, args=(), kwargs=None, num_proc=1)
run_commandline()

horovod.runner.launch
run_commandline()

horovod.torch
init(comm=None, process_sets=None)
shutdown()
is_initialized()
size()
local_size()
cross_size()
rank()
local_rank()
cross_rank()
is_homogeneous()
mpi_threads_supported()
mpi_enabled()
mpi_built()
gloo_enabled()
gloo_built()
nccl_built()
ddl_built()
ccl_built()
cuda_built()
rocm_built()
start_timeline(file_path, mark_cycles=False)
stop_timeline()
ProcessSet(ranks_or_comm)
add_process_set(process_set)
remove_process_set(process_set)
DistributedOptimizer(optimizer, named_parameters=None, compression=..., backward_passes_per_step=1, op=0, \
gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=...)
SyncBatchNorm(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)

horovod.torch.mpi_ops
allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=...)
allreduce(tensor, average=None, name=None, compression=..., op=None, prescale_factor=1.0, postscale_factor=1.0, \
process_set=...)
allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=...)
allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=...)
grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, \
process_set=...)
grouped_allreduce(tensors, average=None, name=None, compression=..., op=None, prescale_factor=1.0, \
postscale_factor=1.0, process_set=...)
grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, \
process_set=...)
grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, \
process_set=...)
sparse_allreduce_async(tensor, name, op, process_set=...)
allgather_async(tensor, name=None, process_set=...)
allgather(tensor, name=None, process_set=...)
grouped_allgather_async(tensors, name=None, process_set=...)
grouped_allgather(tensors, name=None, process_set=...)
broadcast_async(tensor, root_rank, name=None, process_set=...)
broadcast(tensor, root_rank, name=None, process_set=...)
broadcast_async_(tensor, root_rank, name=None, process_set=...)
broadcast_(tensor, root_rank, name=None, process_set=...)
alltoall_async(tensor, splits=None, name=None, process_set=...)
alltoall(tensor, splits=None, name=None, process_set=...)
reducescatter_async(tensor, name=None, op=0, process_set=..., prescale_factor=1.0, postscale_factor=1.0)
reducescatter(tensor, name=None, compression=..., op=0, process_set=..., prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter_async(tensors, name=None, op=0, process_set=..., prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter(tensors, name=None, compression=..., op=0, process_set=..., prescale_factor=1.0, \
postscale_factor=1.0)
poll(handle)
synchronize(handle)
join(device=-1)
barrier(process_set=...)

horovod.torch.functions
broadcast_parameters(params, root_rank)
broadcast_optimizer_state(optimizer, root_rank, model=None)
broadcast_object(obj, root_rank=0, name=None, process_set=...)
allgather_object(obj, name=None)

horovod.torch.optimizer
DistributedOptimizer(optimizer, named_parameters=None, compression=..., backward_passes_per_step=1, op=0)

horovod.common.process_sets
ProcessSet(ranks_or_comm)
add_process_set(process_set)
remove_process_set(process_set)

horovod.common.exceptions
HostsUpdatedInterrupt(skip_sync)
HorovodVersionMismatchError(name, version, installed_version)
get_version_mismatch_message(name, version, installed_version)

horovod.common.util
get_ext_suffix()
get_extension_full_path(pkg_path, *args)
check_extension(ext_name, ext_env_var, pkg_path, *args)
extension_available(ext_base_name, verbose=False)
gpu_available(ext_base_name, verbose=False)
mpi_built(verbose=False)
gloo_built(verbose=False)
nccl_built(verbose=False)
ddl_built(verbose=False)
ccl_built(verbose=False)
env(**kwargs)
num_rank_is_power_2(num_rank)
split_list(l, n)
check_installed_version(name, version, exception=None)
is_iterable(x)
is_version_greater_equal_than(ver, target)
"""

SPARK_TABLE = """
horovod.spark
run(fn, args=(), kwargs=..., num_proc=None, start_timeout=None, use_mpi=None, use_gloo=None, extra_mpi_args=None, \
env=None, stdout=None, stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, executable=None)
run_elastic(fn, args=(), kwargs=..., num_proc=None, min_num_proc=None, max_num_proc=None)

horovod.spark.common.backend
default_num_proc()
SparkBackend(num_proc=None, env=None, **kwargs)

horovod.spark.common.store
Store()
"""

# Where a name differs on purpose: only positional use is known.
RENAMED = {"ranks_or_comm": "ranks"}


def lines(table: str) -> Iterator[tuple[str, str, str]]:
    module = ""
    for line in table.strip().splitlines():
        if "(" in line:
            name, _, arguments = line.partition("(")
            yield module, name, arguments.removesuffix(")")
        elif line:
            module = line


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def check(module: str, name: str, arguments: str) -> None:
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        with pytest.raises(AttributeError, match=rf"{module}\.{name} is not part of farandole"):
            getattr(importlib.import_module(module), name)
        return
    parameters = [
        each
        for each in inspect.signature(found).parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY and not each.name.startswith("_")
    ]
    wanted = [each.strip() for each in arguments.split(", ")] if arguments else []
    for place, word in enumerate(wanted):
        ours = parameters[place]
        their_name, _, default = word.partition("=")
        spelled = str(ours).partition(":")[0].partition("=")[0].strip()
        assert spelled == their_name or spelled == RENAMED.get(their_name), f"{name}: {spelled} for {word}"
        if default and default != "...":
            assert repr(ours.default) == default, f"{name}: {ours} for {word}"
        assert bool(default) == (ours.default is not inspect.Parameter.empty), f"{name}: {ours} for {word}"
    for more in parameters[len(wanted) :]:
        optional = more.default is not inspect.Parameter.empty or more.kind is inspect.Parameter.VAR_KEYWORD
        assert optional, f"{name} needs {more}, which no program of Horovod's gives"


@pytest.mark.parametrize(("module", "name", "arguments"), list(lines(TABLE)), ids=lambda each: str(each)[:40])
def test_arguments(module: str, name: str, arguments: str) -> None:
    check(module, name, arguments)


@pytest.mark.parametrize(("module", "name", "arguments"), list(lines(SPARK_TABLE)), ids=lambda each: str(each)[:40])
def test_arguments_of_spark(module: str, name: str, arguments: str) -> None:
    pytest.importorskip("pyspark")
    check(module, name, arguments)


def test_defaults_that_are_objects() -> None:
    import horovod.torch as hvd

    assert inspect.signature(hvd.allreduce).parameters["process_set"].default is hvd.global_process_set
    assert inspect.signature(hvd.DistributedOptimizer).parameters["compression"].default is hvd.Compression.none


def test_constants_and_builds() -> None:
    import horovod.torch as hvd
    from horovod.common.basics import HorovodBasics

    for where in (hvd, hvd.mpi_ops, HorovodBasics(__file__, "mpi_lib_v2")):
        assert (where.Average, where.Sum, where.Adasum, where.Min, where.Max, where.Product) == (0, 1, 2, 3, 4, 5)
        assert type(where.nccl_built()) is int and where.nccl_built() < 2700
        assert (where.mpi_built(), where.mpi_enabled(), where.gloo_built(), where.gloo_enabled()) == (0, 0, 1, 1)
        assert where.is_initialized() is False
        with pytest.raises(ValueError, match="has not been initialized"):
            where.mpi_threads_supported()
    with pytest.raises(AttributeError, match="'HorovodBasics' object has no attribute 'nothing'"):
        HorovodBasics().nothing  # noqa: B018


def test_str_of_a_process_set() -> None:
    import horovod.torch as hvd

    assert str(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=None, mpi_comm=None)"


def test_a_users_own_compressor() -> None:
    import torch
    from horovod.torch.compression import Compression, Compressor, FP16Compressor, NoneCompressor

    class Half(Compressor):
        pass

    with pytest.raises(NotImplementedError):
        Half.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Half.decompress(torch.ones(1), None)
    for one, other in ((FP16Compressor, Compression.fp16), (NoneCompressor, Compression.none)):
        for tensor in (torch.ones(2), torch.ones(2, dtype=torch.int64)):
            small, ctx = one.compress(tensor)
            same, _ = other.compress(tensor)
            assert small.dtype == same.dtype
            assert one.decompress(small, ctx).dtype == tensor.dtype
