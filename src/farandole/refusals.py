"""Horovod's and Petastorm's names that farandole ignores, refuses or does not have, each with the reason.

An ignored name does nothing and is reported in a warning. A refused name raises an error. An absent module or name
cannot be imported.
"""

import difflib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

ELASTIC: Final = "import ElasticRayExecutor from horovod.ray"
_MPI_THREADS = "the fabric 'mpi' calls MPI from several threads"
_ONE_STREAM = "each communicator of NCCL has one stream"
_NO_CYCLE = "the engine wakes by event, there is no cycle"
_ONE_CONTROLLER = "there is one controller"
_OWN_THREAD = "the waiting thread does the work itself"
_BY_TOPOLOGY = "the algorithm is chosen by size and topology"
_BY_LOGGING = "the format is that of Python's logging"
_NOISE = "the search takes the noise from the samples"

IGNORED_VARIABLES: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": _NO_CYCLE,
    "HOROVOD_CONTROLLER": _ONE_CONTROLLER,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _BY_TOPOLOGY,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _BY_TOPOLOGY,
    "HOROVOD_TORUS_ALLREDUCE": _BY_TOPOLOGY,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "set FARANDOLE_COLLECTIVE_TIMEOUT",
    "HOROVOD_THREAD_AFFINITY": _OWN_THREAD,
    "HOROVOD_MPI_THREADS_DISABLE": _MPI_THREADS,
    "HOROVOD_NUM_NCCL_STREAMS": _ONE_STREAM,
    "HOROVOD_CCL_CACHE": "oneCCL is not used",
    "HOROVOD_LOG_HIDE_TIME": "set the format on Python's logging",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NOISE,
    "HOROVOD_SPARK_START_TIMEOUT": "set FARANDOLE_START_TIMEOUT, or start_timeout of horovod.spark.run",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "a rank always finds its own GPU at its local rank",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "NCCL takes each tensor where it lies",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "streams always wait for results on GPUs themselves",
    "HOROVOD_ENABLE_XLA_OPS": "operations run beside XLA, which compiles what is between them",
    "HOROVOD_DISABLE_NVTX_RANGES": "no NVTX ranges are made",
    "HOROVOD_DISABLE_GROUP_FUSION": "what is fused with a group does not change its results",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "ranks exchange whole shards",
}

_RANKS_OF_OTHERS = (
    *("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", "PMIX_RANK"),
    *("JSM_NAMESPACE_RANK", "SLURM_PROCID", "RANK"),
)

# Variables that request what farandole always does; they are ignored without a warning.
NEEDLESS_VARIABLES: Mapping[str, str] = {"HOROVOD_DYNAMIC_PROCESS_SETS": "process sets are always dynamic"}


def ignored_variables(env: Mapping[str, str], known: Set[str]) -> list[str]:
    """Return the variables of `env` without effect, with reasons: those without a meaning here, and slips in `known`.

    A slip is a misspelled name, or a known one with the other prefix: HOROVOD_SPIN, FARANDOLE_GPU_OPERATIONS.

    One process of a job lists them: farandole's launcher, or the first rank below another launcher."""
    if "FARANDOLE_RANK" in env or any(env.get(name, "0") not in ("", "0") for name in _RANKS_OF_OTHERS):
        return []
    ignored = [f"{name} ({why})" for name, why in IGNORED_VARIABLES.items() if name in env]
    for name in sorted(env.keys() - known - IGNORED_VARIABLES.keys()):
        # Further variables have a meaning elsewhere (rank, secret, ...): list near misses only.
        if name.startswith(("FARANDOLE_", "HOROVOD_")):
            other = _other_prefix(name)
            near = [other] if other in known else difflib.get_close_matches(name, known, 1, 0.9)
            ignored += [f"{name} (did you mean {each}?)" for each in near]
    return ignored


def _other_prefix(name: str) -> str:
    prefix, _, rest = name.partition("_")
    return f"{'HOROVOD' if prefix == 'FARANDOLE' else 'FARANDOLE'}_{rest}"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `horovodrun` that take `values` words each, and why they are ignored or refused."""

    why: str
    flags: tuple[str, ...]
    values: int = 0


IGNORED_OPTIONS: Sequence[Options] = (
    Options("the checks are not cached", ("--disable-cache",)),
    Options(_NO_CYCLE, ("--cycle-time-ms",), 1),
    Options(_BY_TOPOLOGY, ("--hierarchical-allreduce", "--no-hierarchical-allreduce")),
    Options(_BY_TOPOLOGY, ("--hierarchical-allgather", "--no-hierarchical-allgather")),
    Options(_BY_TOPOLOGY, ("--torus-allreduce", "--no-torus-allreduce")),
    Options(_NOISE, ("--autotune-gaussian-process-noise",), 1),
    Options(_MPI_THREADS, ("--mpi-threads-disable", "--no-mpi-threads-disable")),
    Options(_ONE_STREAM, ("--num-nccl-streams",), 1),
    Options(f"{_OWN_THREAD}; see --binding", ("--thread-affinity",), 1),
    Options("see --collective-timeout and --start-timeout", ("--gloo-timeout-seconds",), 1),
    Options(_BY_LOGGING, ("--log-with-timestamp", "--log-without-timestamp")),
    Options(_BY_LOGGING, ("--log-hide-timestamp", "--no-log-hide-timestamp")),
)
REFUSED_OPTIONS: Sequence[Options] = (
    Options("give the options themselves, or set their FARANDOLE_ variables", ("--config-file",), 1),
    Options("ranks are started by ssh, not by jsrun; name the job's hosts with -H", ("--jsrun",)),
)

# Arguments of `horovod.run`; None, their default, causes neither a warning nor an error.
IGNORED_ARGUMENTS: Mapping[str, str] = {
    "disable_cache": "there are no checks to cache",
    "use_gloo": "ranks connect without MPI unless use_mpi asks for it",
    "verbose": "set the level of Python's logger 'farandole'",
}

REFUSED_SPARK_MPI: Final = "ranks of a Spark job connect by themselves, without MPI; leave it out"

# Parameters of the estimators of `horovod.spark`.
IGNORED_PARAMS: Mapping[str, str] = {
    "partitions_per_process": "no Parquet is written",
    "shuffle_buffer_size": "all of a rank's rows are shuffled",
    "train_reader_num_workers": "rows are read from a memory map",
    "val_reader_num_workers": "rows are read from a memory map",
    "reader_pool_type": "rows are read from a memory map",
    "continuous_cols": "a column's type says it",
    "categorical_cols": "a column's type says it",
    "mp_start_method": "no reader processes are started",
    "tensorflow_dataset_prefetch_buffer_size": "no TensorFlow dataset is made",
}
# Names in Horovod's setters and getters that differ from the parameter's own.
_SPELLED: Mapping[str, str] = {
    "shuffling_buffer_size": "shuffle_buffer_size",
    "train_reader_num_worker": "train_reader_num_workers",
    "val_reader_num_worker": "val_reader_num_workers",
}


def ignored_param(accessor: str) -> str | None:
    """Return the parameter without an effect of a setter or getter such as "setReaderPoolType"; None for others."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", accessor[3:]).lower()
    parameter = _SPELLED.get(words, words)
    return parameter if parameter in IGNORED_PARAMS and accessor[:3] in ("set", "get") else None


# Arguments of Petastorm's readers. The ignored ones are accepted, because programs pass them, and have no effect.
IGNORED_READER_ARGUMENTS: Sequence[str] = (
    "pyarrow_serialize",
    "results_queue_size",
    "zmq_copy_buffers",
    "hdfs_driver",
    "cache_extra_settings",
    "convert_early_to_numpy",
)
REFUSED_READER_ARGUMENTS: Mapping[str, str] = {
    "rowgroup_selector": "needs an index that only Petastorm writes; use filters=",
    "filesystem": "give a URL with its scheme, and storage_options=",
}

_LIBRARY = "it is Horovod's compiled library; call the functions of the binding"
_INSIDE = "it is the inside of Horovod's launcher; farandole starts its ranks in its own way"
_INSIDE_SPARK = "it is the inside of Horovod's Spark jobs; farandole's are made in their own way"
_SPARK_MODULES = """
driver gloo_run mpi_run common.cache common.constants common.serialization keras.bare keras.optimizer
keras.remote keras.tensorflow keras.util lightning.legacy lightning.remote lightning.util task.gloo_exec_fn
task.mpirun_exec_fn task.task_info task.task_service torch.remote torch.util
"""
_RUNNER_MODULES = "http driver service task util gloo_run js_run mpi_run run_task"
# A module for which `compat.answers` names one of farandole is absent only until that one exists.
_RUNNER_UTIL = {
    "codec": "pickle with cloudpickle, and encode with base64",
    "config_parser": "set FARANDOLE_ variables, or give the arguments of farandole.run",
    "host_hash": "call cross_rank() after init(), or socket.gethostname()",
    "hosts": "give farandole.run the hosts as 'h1:4,h2:4'",
    "network": "set FARANDOLE_INTERFACE",
    "safe_shell_exec": "call subprocess.run; a rank's processes end with it",
    "secret": "each job has a secret of its own",
    "settings": "give the arguments of farandole.run",
    "timeout": "set FARANDOLE_START_TIMEOUT",
    "tiny_shell_exec": "call subprocess.run",
}
ABSENT_MODULES: Mapping[str, str] = {
    "horovod.spark.lightning.datamodule": "leave data_module out: ranks read the DataFrame's rows",
    **{f"horovod.spark.{module}": _INSIDE_SPARK for module in _SPARK_MODULES.split()},
    "horovod.spark.common.util": "fit takes the DataFrame itself; for fit_on_parquet let Spark write the rows to "
    "store.get_train_data_path() and store.get_val_data_path(), with vectors as arrays",
    "horovod.spark.conf": ELASTIC,
    **{f"horovod.runner.{module}": _INSIDE for module in _RUNNER_MODULES.split()},
    "horovod.runner.common.service": _INSIDE,
    **{f"horovod.runner.common.util.{module}": why for module, why in _RUNNER_UTIL.items()},
    **{f"horovod.ray.{module}": _INSIDE for module in ("strategy", "worker", "adapter", "driver_service", "utils")},
    "horovod.runner.elastic": _INSIDE,
    "horovod._keras": "its names without an underscore or Impl are in horovod.keras and horovod.tensorflow.keras",
    **dict.fromkeys(("horovod.torch.mpi_lib_v2", "horovod.torch.mpi_lib", "horovod.tensorflow.mpi_lib"), _LIBRARY),
    "horovod.ray.elastic": ELASTIC,
    "horovod.ray.elastic_v2": ELASTIC,
    "petastorm.ngram": "make windows of rows with Spark, and write each as a row of arrays",
    "petastorm.etl.rowgroup_indexing": "give filters= to the reader, which skips row groups by their statistics",
    "petastorm.etl.rowgroup_indexers": "give filters= to the reader, which skips row groups by their statistics",
    "petastorm.etl.petastorm_generate_metadata": "write the rows within materialize_dataset",
    "petastorm.selectors": "give filters= or predicate= to the reader",
    "petastorm.local_disk_cache": "give cache_type='local-disk' and cache_location= to the reader",
    "petastorm.fs_utils": "call fsspec.core.url_to_fs",
    "petastorm.spark_utils": "call spark.read.parquet(url).rdd",
    "petastorm.tools": "copy the data set with Spark, or as files",
    "petastorm.weighted_sampling_reader": "sample the DataFrame before it is written",
}

_LAUNCH = "call horovod.run, or start the command horovodrun"
_NVTABULAR = "NVTabular, which needs GPUs, is not used; leave data_module out, or derive a class from DataModule"
_GRADIENTS = "call grouped_allreduce, or wrap the tape or the optimizer"
_AGGREGATION = "give backward_passes_per_step= to the optimizer, which adds the gradients up"
_TORCH_FUNCTIONS = """
HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall
HorovodReducescatter HorovodGroupedReducescatter
"""
_HELPERS = "LocalGradientAggregationHelper apply_op_to_not_none_tensors get_not_none_from_list"
ABSENT_NAMES: Mapping[str, Mapping[str, str]] = {
    "horovod.runner": {"_HorovodArgs": _LAUNCH},
    "horovod.runner.launch": {
        **dict.fromkeys(("_run", "_run_static", "_run_elastic", "parse_args"), _LAUNCH),
        "check_build": "start the command horovodrun --check-build",
    },
    "horovod.common.elastic": dict.fromkeys(
        ("notification_manager", "WorkerNotificationManager"),
        "state.commit() and state.check_host_updates() ask the launcher themselves; leave it out",
    ),
    "horovod.spark.common.params": dict.fromkeys(
        ("ModelParams", "HasOutputCols"), "derive a fitted model from TorchModel, LightningModel or KerasModel"
    ),
    "horovod.spark.task": {"task_exec": "ranks are the tasks of a barrier stage"},
    "horovod.torch.mpi_ops": {
        **dict.fromkeys(_TORCH_FUNCTIONS.split(), "call the operation itself, which can be differentiated"),
        "_handle_map": "a handle holds its own tensors; call synchronize(handle)",
    },
    "horovod.tensorflow.mpi_ops": {"MPI_LIB": _LIBRARY},
    "horovod.tensorflow.gradient_aggregation": dict.fromkeys(_HELPERS.split(), _AGGREGATION),
    "horovod.tensorflow.gradient_aggregation_eager": {"LocalGradientAggregationHelperEager": _AGGREGATION},
    "horovod.tensorflow": {"_make_allreduce_grads_fn": _GRADIENTS},
    "horovod.tensorflow.util": {
        **dict.fromkeys(("vars_to_refs", "refs_to_vars"), "variable.ref() and its deref() do the same"),
        **dict.fromkeys(("_cache", "_make_subgraph"), "decorate the function with tf.function"),
    },
    "horovod.common.util": {"get_average_backwards_compatibility_fun": "pass op= to the operation"},
    "horovod.spark.keras.datamodule": {"NVTabularDataModule": _NVTABULAR},
    "horovod.spark.torch.datamodule": {"NVTabularDataModule": _NVTABULAR},
    "petastorm.spark.spark_dataset_converter": {
        "TorchDatasetContextManager": "call make_torch_dataloader of the converter",
        "TFDatasetContextManager": "call make_tf_dataset of the converter",
        "register_delete_dir_handler": "copies are removed by fsspec, from any store that it reaches; leave it out",
    },
    "petastorm.pytorch": {
        "decimal_friendly_collate": "decimals are read as float64, which torch's default_collate takes",
    },
    "petastorm.tf_utils": {"tf_tensors": "call make_petastorm_dataset, whose iterator gives the tensors"},
}
