"""Which module and which name of Horovod's is answered by what of ours. A table, and what can be asked of it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import farandole

__all__ = ["BASICS", "IMPORTABLE", "MODULES", "PACKAGES", "VERSION", "Answer", "missing_module", "missing_name"]

# What programs compare: Horovod's last release, whose interface this is; the local part says who answers.
VERSION = f"0.28.1+farandole.{farandole.__version__}"

PACKAGES = ("horovod", "sparkdl")

# Holds a package of each of these names, for processes in which nobody has called `install`.
IMPORTABLE = Path(__file__).with_name("importable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What stands behind one of Horovod's modules."""

    by: str = ""  # our module, whose public names it has: all of them, or with `known` those only
    own: Mapping[str, str] = field(default_factory=dict)  # further names: "module:attribute"
    parts: str = ""  # the modules below it that come with it
    known: str = ""  # Horovod's names, so that one that is not there is called by its name
    every: bool = False  # all public names of `by`, `known` or not
    not_here: Mapping[str, str] = field(default_factory=dict)  # Horovod's names that stay away, and why
    why: str = ""  # it is not there, or why not if `by` is not there

    def offered(self) -> tuple[str, ...]:
        """Return the names of `by` that the module has; imports it."""
        if not self.by:
            return ()
        public: list[str] = importlib.import_module(self.by).__all__
        known = set(self.known.split())
        return tuple(name for name in public if self.every or name in known)


_COMPRESSION = {
    name: f"farandole.compat.compression:{name}" for name in ("Compressor", "NoneCompressor", "FP16Compressor")
}
_BASICS = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built Average Sum Adasum Min Max Product
"""
BASICS = frozenset(_BASICS.split())
_TORCH_OPS = f"""
{_BASICS} Compression ProcessSet global_process_set
allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ grouped_allreduce_async
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async poll synchronize join barrier
"""
_TORCH_FUNCTIONS = """
HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall
HorovodReducescatter HorovodGroupedReducescatter
"""
_TORCH_STATE = "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"
_PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
_EXCEPTIONS = "HostsUpdatedInterrupt HorovodVersionMismatchError get_version_mismatch_message"
_UTIL = """
ccl_built check_extension check_installed_version ddl_built extension_available get_ext_suffix
get_extension_full_path gloo_built gpu_available is_iterable is_version_greater_equal_than mpi_built nccl_built
num_rank_is_power_2 split_list
"""


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_DATA = _from("farandole.compat.data_loader", "BaseDataLoader AsyncDataLoaderMixin")
_RUN = {"run": "farandole.compat.launching:run"}
_COMMAND = {"run_commandline": "farandole.compat.horovodrun:run_commandline"}
_VERSION = {"__version__": "farandole.compat.answers:VERSION"}
_NO_ELASTIC = "elastic training is not there yet"
_NO_ELASTIC_RUN = {"run_elastic": _NO_ELASTIC}
_INSIDE = "it is the inside of Horovod's launcher; farandole starts its ranks in its own way"
_NO_TENSORFLOW = "TensorFlow and Keras come in a later version; PyTorch programs run"

MODULES: Mapping[str, Answer] = {
    "horovod": Answer(own={**_RUN, **_VERSION}),
    "horovod.version": Answer(own=_VERSION),
    # Frameworks
    "horovod.torch": Answer(
        by="farandole.torch",
        every=True,
        own={
            "HostsUpdatedInterrupt": "farandole.compat.exceptions:HostsUpdatedInterrupt",
            "check_extension": "farandole.compat.horovod_util:check_extension",
            **_VERSION,
        },
        parts="mpi_ops compression functions optimizer sync_batch_norm elastic",
        known=f"{_TORCH_OPS} {_PROCESS_SETS} {_TORCH_STATE} DistributedOptimizer SyncBatchNorm HorovodInternalError",
    ),
    "horovod.torch.mpi_ops": Answer(
        by="farandole.torch",
        own=_from("farandole.compat.basics", "HorovodBasics"),
        known=_TORCH_OPS,
        not_here=dict.fromkeys(_TORCH_FUNCTIONS.split(), "call the operation itself, which can be differentiated"),
    ),
    "horovod.torch.functions": Answer(by="farandole.torch", known=_TORCH_STATE),
    "horovod.torch.optimizer": Answer(
        by="farandole.torch",
        own={
            "_DistributedOptimizer": "farandole.torch.optimizer:_Distributed",
            "_DistributedAdasumOptimizer": "farandole.torch.adasum:AdasumFront",
        },
        known="DistributedOptimizer",
    ),
    "horovod.torch.compression": Answer(by="farandole.torch", own=_COMPRESSION, known="Compression"),
    "horovod.torch.sync_batch_norm": Answer(by="farandole.torch", known="SyncBatchNorm"),
    "horovod.torch.elastic": Answer(
        by="farandole.torch.elastic",
        every=True,
        parts="sampler state",
        known="run TorchState ElasticSampler",
        why=_NO_ELASTIC,
    ),
    "horovod.torch.elastic.sampler": Answer(by="farandole.torch.elastic", known="ElasticSampler", why=_NO_ELASTIC),
    "horovod.torch.elastic.state": Answer(by="farandole.torch.elastic", known="TorchState", why=_NO_ELASTIC),
    "horovod.tensorflow": Answer(by="farandole.tensorflow", every=True, why=_NO_TENSORFLOW),
    "horovod.tensorflow.keras": Answer(by="farandole.tensorflow.keras", every=True, why=_NO_TENSORFLOW),
    "horovod.keras": Answer(by="farandole.keras", every=True, why=_NO_TENSORFLOW),
    "horovod.mxnet": Answer(by="farandole.mxnet", every=True, why="MXNet comes in a later version"),
    "horovod.ray": Answer(why="farandole starts no ranks through Ray"),
    # What frameworks share
    "horovod.common": Answer(parts="basics exceptions process_sets util"),
    "horovod.common.basics": Answer(own=_from("farandole.compat.basics", "HorovodBasics")),
    "horovod.common.process_sets": Answer(by="farandole.core.process_sets", known=_PROCESS_SETS),
    "horovod.common.exceptions": Answer(
        by="farandole.errors", own=_from("farandole.compat.exceptions", _EXCEPTIONS), known="HorovodInternalError"
    ),
    "horovod.common.util": Answer(
        own={**_from("farandole.compat.horovod_util", _UTIL), "env": "farandole.compat.children:env"},
        not_here={"get_average_backwards_compatibility_fun": "pass op= to the operation"},
    ),
    "horovod.common.elastic": Answer(why=_NO_ELASTIC),
    "horovod.data": Answer(own=_DATA, parts="data_loader_base"),
    "horovod.data.data_loader_base": Answer(own=_DATA),
    # Launchers
    "horovod.runner": Answer(own={**_RUN, **_COMMAND}, parts="launch"),
    "horovod.runner.launch": Answer(own=_COMMAND),
    "horovod.runner.elastic": Answer(why=_NO_ELASTIC),
    "horovod.runner.http": Answer(why=_INSIDE),
    "horovod.runner.common": Answer(why=_INSIDE),
    "horovod.runner.driver": Answer(why=_INSIDE),
    "horovod.runner.service": Answer(why=_INSIDE),
    "horovod.runner.task": Answer(why=_INSIDE),
    "horovod.runner.util": Answer(why=_INSIDE),
    "horovod.spark": Answer(own=_from("farandole.compat.spark", "run"), not_here=_NO_ELASTIC_RUN),
    "horovod.spark.runner": Answer(own=_from("farandole.compat.spark", "run"), not_here=_NO_ELASTIC_RUN),
    "horovod.spark.torch": Answer(by="farandole.spark.torch", known="TorchEstimator TorchModel"),
    "horovod.spark.torch.estimator": Answer(by="farandole.spark.torch", known="TorchEstimator TorchModel"),
    "horovod.spark.keras": Answer(by="farandole.spark.keras", every=True, why=_NO_TENSORFLOW),
    "horovod.spark.lightning": Answer(
        by="farandole.spark.lightning", every=True, why="the Lightning estimator comes in a later version"
    ),
    "horovod.spark.common": Answer(),
    "horovod.spark.common.backend": Answer(
        own=_from("farandole.compat.spark", "Backend SparkBackend default_num_proc")
    ),
    "horovod.spark.common.store": Answer(
        own=_from("farandole.spark.store", "Store FilesystemStore LocalStore"),
        not_here=dict.fromkeys(
            ("AbstractFilesystemStore", "HDFSStore", "DBFSLocalStore"),
            "Store.create takes every path and URL that fsspec serves",
        ),
    ),
    "horovod.spark.common.params": Answer(own=_from("farandole.spark.params", "EstimatorParams")),
    "horovod.spark.common.estimator": Answer(
        own={
            "HorovodEstimator": "farandole.spark.estimator:DataFrameEstimator",
            "HorovodModel": "farandole.spark.transformer:DataFrameModel",
        }
    ),
    "horovod.spark.task": Answer(why="ranks are the tasks of a barrier stage; CUDA_VISIBLE_DEVICES names their GPUs"),
    # Databricks
    "sparkdl": Answer(own=_from("farandole.compat.spark", "HorovodRunner"), parts="horovod"),
    "sparkdl.horovod": Answer(own=_from("farandole.spark.logs", "log_to_driver")),
    "sparkdl.horovod.runner_base": Answer(own=_from("farandole.compat.spark", "HorovodRunner")),
    "sparkdl.horovod.tensorflow": Answer(),
    "sparkdl.horovod.tensorflow.keras": Answer(by="farandole.spark.callbacks", known="LogCallback", why=_NO_TENSORFLOW),
    "sparkdl.estimators": Answer(why="HorovodEstimator trains TensorFlow 1 model functions, which come later"),
}


def missing_module(name: str) -> str | None:
    """Say why Horovod's module `name`, or a name of a module, is not there; None when it is, or was never there."""
    answer = MODULES.get(name)
    if answer is None:
        return _missing_part(name)
    if answer.why and not (answer.by and _exists(answer.by)):
        return _sentence(name, answer.why)
    return None


def missing_name(module: str, name: str) -> str | None:
    """Say why Horovod's `module` lacks `name`; None when Horovod has no such name either."""
    whole, answer = f"{module}.{name}", MODULES[module]
    if name in answer.not_here:
        return _sentence(whole, answer.not_here[name])
    if name in answer.known.split():
        return _sentence(whole, "this version does not have it yet")
    return missing_module(whole) if whole in MODULES else None


def _missing_part(name: str) -> str | None:
    """`from horovod.torch import join` asks for a module `horovod.torch.join` when there is no such name."""
    module, _, last = name.rpartition(".")
    above = module
    while above and above not in MODULES:
        above = above.rpartition(".")[0]
    if above and missing_module(above):
        # What is below a module that is not there is not there for the same reason.
        return _sentence(name, MODULES[above].why)
    if module not in MODULES or last in MODULES[module].offered():
        return None
    return missing_name(module, last)


def _sentence(name: str, why: str) -> str:
    return f"{name} is not part of farandole {farandole.__version__}: {why}"


def _exists(module: str) -> bool:
    """Whether a module of ours exists; of what it imports nothing is asked."""
    package = module.rpartition(".")[0]
    return (package == "farandole" or _exists(package)) and find_spec(module) is not None
