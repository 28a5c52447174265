"""Table of modules of Horovod, sparkdl and Petastorm with the names that farandole offers in them."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole.refusals import ABSENT_MODULES, ABSENT_NAMES

# Horovod's last release, whose interface compat has. Programs compare it, or take it apart into three numbers.
VERSION = "0.28.1"

# The oldest Lightning that the estimator supports; programs compare their Lightning with it.
MIN_PL_VERSION = "2.4"
PETASTORM_VERSION = "0.12.1"

PACKAGES = ("horovod", "sparkdl", "petastorm")

# The folder with a package of each of these names, for processes that have not called `install`.
IMPORTABLE = Path(__file__).with_name("importable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """Contents of one of Horovod's modules."""

    by: str = ""  # farandole's module; its public names are offered if they are in `known` or `every` is set
    own: Mapping[str, str] = field(default_factory=dict)  # names that come from elsewhere, as "module:attribute"
    parts: str = ""  # submodules that are imported with it
    later: str = ""  # submodules that Horovod imports with it; here the first use of their names does
    known: str = ""  # Horovod's names; a missing one is reported as not there yet
    every: bool = False  # offer all public names of `by`
    needs: str = ""  # packages that the module and its submodules need
    program: str = ""  # farandole's module that `python -m` runs

    def offered(self) -> tuple[str, ...]:
        """Return the public names of `by` that the module offers. Imports `by`."""
        if not self.by:
            return ()
        public: list[str] = importlib.import_module(self.by).__all__
        known = set(self.known.split())
        return tuple(name for name in public if (self.every or name in known) and name not in self.own)


_BASICS = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built sycl_built Average Sum Adasum Min Max Product
"""
BASICS = frozenset(_BASICS.split())
_TORCH_OPS = f"""
{_BASICS} Compression ProcessSet global_process_set
allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ grouped_allreduce_async
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async poll synchronize join barrier
"""
_OBJECTS = "broadcast_object allgather_object"
_TORCH_STATE = f"broadcast_parameters broadcast_optimizer_state {_OBJECTS}"
_MXNET_OPS = f"""
{_BASICS} Compression ProcessSet global_process_set allreduce allreduce_ grouped_allreduce grouped_allreduce_
allgather grouped_allgather broadcast broadcast_ alltoall reducescatter grouped_reducescatter
"""
_TENSORFLOW_OPS = f"""
{_BASICS} ProcessSet global_process_set add_process_set remove_process_set
allgather grouped_allgather broadcast broadcast_ alltoall join
size_op local_size_op rank_op local_rank_op process_set_included_op
"""
_TENSORFLOW_STATE = "broadcast_variables broadcast_object broadcast_object_fn allgather_object"
_TENSORFLOW = f"""
{_TENSORFLOW_OPS} {_TENSORFLOW_STATE} Compression HorovodInternalError
allreduce grouped_allreduce reducescatter grouped_reducescatter
broadcast_global_variables BroadcastGlobalVariablesHook SyncBatchNormalization
DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape
"""
_KERAS = f"""
{_BASICS} Compression DistributedOptimizer allreduce allgather broadcast reducescatter broadcast_global_variables
load_model
"""
_CALLBACKS = """
BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
BestModelCheckpoint
"""
_PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
_EXCEPTIONS = "HorovodVersionMismatchError get_version_mismatch_message"
_TENSORFLOW_ELASTIC = "run TensorFlowState TensorFlowKerasState"
_KERAS_ELASTIC = "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"
_UTIL = """
ccl_built check_extension check_installed_version ddl_built extension_available get_ext_suffix
get_extension_full_path gloo_built gpu_available is_iterable is_version_greater_equal_than mpi_built nccl_built
num_rank_is_power_2 split_list
"""


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


def _compression(framework: str) -> dict[str, str]:
    own = _from(f"farandole.compat.{framework}_compression", "NoneCompressor FP16Compressor")
    return {"Compressor": "farandole.compat.compression:Compressor", **own}


# Names that Horovod's own tests use, and programs that were written after them.
_OPERATIONS = _from("farandole.compat.basics", "HorovodBasics _basics")
_EAGERLY = {"_executing_eagerly": "tensorflow:executing_eagerly"}
_TENSORFLOW_SUM = _from("farandole.compat.tensorflow_ops", "_allreduce")
_CHECK_EXTENSION = _from("farandole.compat.horovod_util", "check_extension")
_INTERRUPT = _from("farandole.elastic", "HostsUpdatedInterrupt")
_DATA = _from("farandole.compat.data_loader", "BaseDataLoader AsyncDataLoaderMixin")
_RUN = {"run": "farandole.compat.launching:run"}
_COMMAND = {"run_commandline": "farandole.compat.horovodrun:run_commandline"}
_READERS = _from("farandole.data", "make_reader make_batch_reader")
_TRANSFORM = _from("farandole.data.transform", "TransformSpec edit_field transform_schema")
_CONVERTER = {
    **_from("farandole.spark.converter", "SparkDatasetConverter"),
    **_from("farandole.compat.petastorm", "make_spark_converter"),
}
_LIGHTNING = {
    "TorchEstimator": "farandole.spark.lightning:LightningEstimator",
    "TorchModel": "farandole.spark.lightning:LightningModel",
}


def _command(module: str) -> Module:
    return Module(own=_from(module, "main"), program=module)


_PARAMS = _from("farandole.estimators.params", "EstimatorParams")
_VERSION = {"__version__": "farandole.compat.answers:VERSION"}

MODULES: Mapping[str, Module] = {
    **dict.fromkeys([*ABSENT_MODULES, *ABSENT_NAMES], Module()),
    "horovod": Module(own={**_RUN, **_VERSION}, later="common runner"),
    "horovod.version": Module(own=_VERSION),
    # Frameworks
    "horovod.torch": Module(
        by="farandole.torch",
        every=True,
        own={
            **_INTERRUPT,
            **_CHECK_EXTENSION,
            **_VERSION,
        },
        parts="mpi_ops compression functions optimizer sync_batch_norm elastic",
        known=f"{_TORCH_OPS} {_PROCESS_SETS} {_TORCH_STATE} DistributedOptimizer SyncBatchNorm HorovodInternalError",
        needs="torch",
    ),
    "horovod.torch.mpi_ops": Module(
        by="farandole.torch",
        own=_OPERATIONS,
        known=f"{_TORCH_OPS} {_PROCESS_SETS} HorovodInternalError",
    ),
    "horovod.torch.functions": Module(by="farandole.torch", known=_TORCH_STATE),
    "horovod.torch.optimizer": Module(
        by="farandole.torch",
        own={
            "_DistributedOptimizer": "farandole.torch.optimizer:_Distributed",
            "_DistributedAdasumOptimizer": "farandole.torch.adasum:AdasumFront",
        },
        known="DistributedOptimizer",
    ),
    "horovod.torch.compression": Module(by="farandole.torch", own=_compression("torch"), known="Compression"),
    "horovod.torch.sync_batch_norm": Module(by="farandole.torch", known="SyncBatchNorm"),
    "horovod.torch.elastic": Module(
        by="farandole.torch.elastic",
        every=True,
        parts="sampler state",
        known="run TorchState ElasticSampler",
    ),
    "horovod.torch.elastic.sampler": Module(by="farandole.torch.elastic", known="ElasticSampler"),
    "horovod.torch.elastic.state": Module(
        by="farandole.torch.elastic",
        known="TorchState StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler "
        "get_handler_registry set_handler_registry",
    ),
    "horovod.tensorflow": Module(
        by="farandole.tensorflow",
        every=True,
        own={
            **_CHECK_EXTENSION,
            **_EAGERLY,
            **_TENSORFLOW_SUM,
            "_DistributedOptimizer": "farandole.tensorflow.optimizer:_Distributed",
            "_LegacyOptimizer": "tensorflow.compat.v1.train:Optimizer",
        },
        parts="mpi_ops compression functions gradient_aggregation gradient_aggregation_eager sync_batch_norm util "
        "elastic",
        known=_TENSORFLOW,
        needs="tensorflow",
    ),
    "horovod.tensorflow.elastic": Module(by="farandole.tensorflow.elastic", every=True, known=_TENSORFLOW_ELASTIC),
    "horovod.tensorflow.mpi_ops": Module(
        by="farandole.tensorflow",
        own={**_OPERATIONS, **_EAGERLY, **_TENSORFLOW_SUM},
        known=_TENSORFLOW_OPS,
    ),
    "horovod.tensorflow.util": Module(own=_EAGERLY),
    "horovod.tensorflow.functions": Module(by="farandole.tensorflow", known=_TENSORFLOW_STATE),
    "horovod.tensorflow.compression": Module(
        by="farandole.tensorflow", own=_compression("tensorflow"), known="Compression"
    ),
    "horovod.tensorflow.sync_batch_norm": Module(by="farandole.tensorflow", known="SyncBatchNormalization"),
    "horovod.tensorflow.data": Module(),
    "horovod.tensorflow.data.compute_service": Module(by="farandole.compat.tensorflow_data", every=True),
    "horovod.tensorflow.data.compute_worker": _command("farandole.tensorflow.data_service.compute_worker"),
    "horovod.tensorflow.keras": Module(
        by="farandole.keras",
        every=True,
        parts="callbacks elastic",
        known=f"{_KERAS} {_PROCESS_SETS}",
        needs="tensorflow keras",
    ),
    "horovod.tensorflow.keras.callbacks": Module(by="farandole.keras.callbacks", known=_CALLBACKS),
    "horovod.tensorflow.keras.elastic": Module(by="farandole.keras.elastic", every=True, known=_KERAS_ELASTIC),
    "horovod.keras": Module(
        by="farandole.keras",
        every=True,
        own=_from("farandole.compat.horovod_keras", "DistributedOptimizer allreduce"),
        parts="callbacks elastic",
        known=f"{_KERAS} PartialDistributedOptimizer",
        needs="keras",
    ),
    "horovod.keras.callbacks": Module(
        by="farandole.keras.callbacks",
        own=_from("farandole.compat.horovod_keras", "BestModelCheckpoint"),
        known=_CALLBACKS,
    ),
    "horovod.keras.elastic": Module(by="farandole.keras.elastic", every=True, known=_KERAS_ELASTIC),
    "horovod.mxnet": Module(
        by="farandole.mxnet",
        every=True,
        own=_CHECK_EXTENSION,
        parts="mpi_ops compression functions",
        known=f"{_MXNET_OPS} {_PROCESS_SETS} {_OBJECTS} DistributedOptimizer DistributedTrainer broadcast_parameters",
        needs="mxnet",
    ),
    "horovod.mxnet.mpi_ops": Module(by="farandole.mxnet", own=_OPERATIONS, known=_MXNET_OPS),
    "horovod.mxnet.functions": Module(by="farandole.mxnet", known=_OBJECTS),
    "horovod.mxnet.compression": Module(by="farandole.mxnet", own=_compression("mxnet"), known="Compression"),
    # What frameworks share
    "horovod.common": Module(parts="basics exceptions process_sets util"),
    "horovod.common.basics": Module(own=_from("farandole.compat.basics", "HorovodBasics")),
    "horovod.common.process_sets": Module(by="farandole.core.process_sets.process_set", known=_PROCESS_SETS),
    "horovod.common.exceptions": Module(
        by="farandole.errors",
        own={**_INTERRUPT, **_from("farandole.compat.exceptions", _EXCEPTIONS)},
        known="HorovodInternalError",
    ),
    "horovod.common.elastic": Module(by="farandole.elastic", known="State ObjectState run_fn"),
    "horovod.common.util": Module(
        own={**_from("farandole.compat.horovod_util", _UTIL), "env": "farandole.compat.children:env"},
    ),
    "horovod.data": Module(own=_DATA, parts="data_loader_base"),
    "horovod.data.data_loader_base": Module(own=_DATA),
    # Launchers
    "horovod.runner": Module(own={**_RUN, **_COMMAND}, parts="launch"),
    "horovod.runner.launch": Module(own=_COMMAND),
    "horovod.runner.common": Module(parts="util"),
    "horovod.runner.common.util": Module(),
    "horovod.runner.common.util.env": Module(own=_from("farandole.compat.children", "get_env_rank_and_size")),
    "horovod.spark": Module(own=_from("farandole.compat.spark", "run run_elastic"), needs="pyspark"),
    "horovod.spark.task": Module(own={"get_available_devices": "farandole.spark.jobs.child:available_devices"}),
    "horovod.spark.runner": Module(own=_from("farandole.compat.spark", "run run_elastic")),
    "horovod.spark.torch": Module(by="farandole.spark.torch", known="TorchEstimator TorchModel", needs="torch"),
    "horovod.spark.torch.estimator": Module(by="farandole.spark.torch", own=_PARAMS, known="TorchEstimator TorchModel"),
    "horovod.spark.torch.datamodule": Module(own=_from("farandole.spark.data_module", "PetastormDataModule")),
    "horovod.spark.keras": Module(by="farandole.spark.keras", known="KerasEstimator KerasModel", needs="keras"),
    "horovod.spark.keras.estimator": Module(by="farandole.spark.keras", own=_PARAMS, known="KerasEstimator KerasModel"),
    "horovod.spark.keras.datamodule": Module(own=_from("farandole.spark.data_module", "PetastormDataModule")),
    "horovod.spark.tensorflow": Module(needs="tensorflow"),
    "horovod.spark.tensorflow.compute_worker": _command("farandole.spark.data_service"),
    "horovod.spark.lightning": Module(own=_LIGHTNING, needs="torch lightning_utilities"),
    "horovod.spark.lightning.estimator": Module(
        own={**_LIGHTNING, **_PARAMS, "MIN_PL_VERSION": "farandole.compat.answers:MIN_PL_VERSION"}
    ),
    "horovod.spark.data_loaders": Module(
        own=_from("farandole.compat.pytorch_data_loaders", "PytorchDataLoader PytorchAsyncDataLoader"),
        parts="pytorch_data_loaders",
        needs="torch",
    ),
    "horovod.spark.data_loaders.pytorch_data_loaders": Module(by="farandole.compat.pytorch_data_loaders", every=True),
    "horovod.spark.common": Module(),
    "horovod.spark.common.backend": Module(
        own=_from("farandole.compat.spark", "Backend SparkBackend default_num_proc")
    ),
    "horovod.spark.common.datamodule": Module(own=_from("farandole.spark.data_module", "DataModule")),
    "horovod.spark.common.store": Module(
        own=_from(
            "farandole.spark.store",
            "Store FilesystemStore LocalStore AbstractFilesystemStore HDFSStore DBFSLocalStore",
        ),
    ),
    "horovod.spark.common.params": Module(own=_PARAMS),
    "horovod.spark.common.estimator": Module(
        own={
            "HorovodEstimator": "farandole.estimators.estimator:DataFrameEstimator",
            "HorovodModel": "farandole.estimators.transformer:DataFrameModel",
        }
    ),
    "horovod.ray": Module(own=_from("farandole.compat.ray", "RayExecutor ElasticRayExecutor"), needs="ray"),
    "horovod.ray.runner": Module(own=_from("farandole.compat.ray", "RayExecutor")),
    # Databricks
    "sparkdl": Module(
        own={
            **_from("farandole.compat.spark", "HorovodRunner"),
            **_from("farandole.spark.tf_transformer", "TFTransformer TFInputGraph"),
        },
        parts="horovod",
        needs="pyspark",
    ),
    "sparkdl.estimators": Module(),
    "sparkdl.estimators.horovod_estimator": Module(),
    "sparkdl.estimators.horovod_estimator.estimator": Module(
        own=_from("farandole.compat.spark_estimator", "HorovodEstimator"), needs="tensorflow"
    ),
    "sparkdl.graph": Module(),
    "sparkdl.graph.input": Module(own=_from("farandole.spark.tf_transformer", "TFInputGraph")),
    "sparkdl.transformers": Module(),
    "sparkdl.transformers.tf_tensor": Module(own=_from("farandole.spark.tf_transformer", "TFTransformer")),
    "sparkdl.horovod": Module(own=_from("farandole.spark.logs", "log_to_driver")),
    "sparkdl.horovod.runner_base": Module(own=_from("farandole.compat.spark", "HorovodRunner")),
    "sparkdl.horovod.tensorflow": Module(),
    "sparkdl.horovod.tensorflow.keras": Module(by="farandole.spark.callbacks", known="LogCallback", needs="keras"),
    # Petastorm
    "petastorm": Module(
        own={
            **_READERS,
            **_from("farandole.data.transform", "TransformSpec"),
            "__version__": "farandole.compat.answers:PETASTORM_VERSION",
        }
    ),
    "petastorm.errors": Module(own=_from("farandole.errors", "NoDataAvailableError")),
    "petastorm.reader": Module(own=_from("farandole.data", "Reader make_reader make_batch_reader")),
    "petastorm.transform": Module(own=_TRANSFORM),
    "petastorm.predicates": Module(by="farandole.compat.predicates", every=True),
    "petastorm.pytorch": Module(
        own=_from("farandole.torch.data", "DataLoader BatchedDataLoader InMemBatchedDataLoader"), needs="torch"
    ),
    "petastorm.unischema": Module(by="farandole.data.unischema.schema", every=True),
    "petastorm.codecs": Module(by="farandole.data.unischema.codecs", every=True),
    "petastorm.etl": Module(),
    "petastorm.etl.dataset_metadata": Module(by="farandole.spark.rows.petastorm_dataset", every=True, needs="pyspark"),
    "petastorm.tf_utils": Module(own=_from("farandole.tensorflow.data", "make_petastorm_dataset"), needs="tensorflow"),
    "petastorm.spark": Module(own=_CONVERTER, parts="spark_dataset_converter", needs="pyspark"),
    "petastorm.spark.spark_dataset_converter": Module(own=_CONVERTER),
}
