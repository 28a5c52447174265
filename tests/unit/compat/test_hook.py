"""The import hook: what is answered, what says why it is not, and what stays as it was without it."""

import importlib
import importlib.util
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

import farandole
from farandole.compat import install, uninstall
from farandole.compat.absent import missing_module, missing_package
from farandole.compat.answers import IMPORTABLE, MODULES, VERSION, Module
from farandole.errors import ConfigError
from farandole.refusals import ABSENT_MODULES

torch = pytest.importorskip("torch")


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def python(code: str, *, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


def test_without_it_there_is_no_horovod() -> None:
    done = python("import sys, farandole.compat\nimport horovod")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'horovod'"


def test_importing_compat_loads_no_framework_and_changes_nothing() -> None:
    code = (
        "import sys; path, finders = sys.path[:], sys.meta_path[:]\n"
        "import farandole.compat, farandole.compat.horovodrun, farandole.compat.__main__\n"
        "print(path == sys.path, finders == sys.meta_path)\n"
        "print(sorted({'torch', 'numpy', 'pyspark', 'cloudpickle', 'farandole._native'} & sys.modules.keys()))"
    )
    assert python(code).stdout == "True True\n[]\n"


def test_it_goes_as_it_came() -> None:
    before = sys.path[:], sys.meta_path[:], set(sys.modules)
    install()
    install()
    import horovod.version

    assert horovod.version.__version__ == VERSION
    assert [int(part) for part in str(horovod.version.__version__).split(".")] == [0, 28, 1]  # as programs do
    assert len(sys.meta_path) == len(before[1]) + 1
    uninstall()
    uninstall()
    assert (sys.path, sys.meta_path) == before[:2]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "sparkdl", "petastorm")]
    with pytest.raises(ModuleNotFoundError, match="No module named 'horovod'"):
        importlib.import_module("horovod.torch")


def test_operations_are_our_own(installed: None) -> None:
    import horovod.torch as hvd

    import farandole.torch

    assert hvd.allreduce is farandole.torch.allreduce
    assert hvd.mpi_ops.Average == hvd.Average == 0
    assert set(farandole.torch.__all__) <= set(dir(hvd)) and set(farandole.torch.__all__) <= set(hvd.__all__)
    assert hvd.__file__ is not None and "farandole" in hvd.__file__


def test_import_horovod_alone_gives_what_horovods_imports() -> None:
    done = python(
        "import sys, farandole.compat; farandole.compat.install(); import horovod; "
        "assert 'horovod.common' not in sys.modules; "
        "assert {'common', 'runner'} <= set(dir(horovod)); assert not hasattr(horovod, 'torch'); "
        "print(horovod.common.util.split_list([1, 2, 3], 2), horovod.runner.run is horovod.run)"
    )
    assert (done.stdout, done.stderr) == ("[[1, 2], [3]] True\n", "")


def test_petastorms_names_are_our_own(installed: None) -> None:
    from petastorm import TransformSpec, __version__, make_batch_reader
    from petastorm.reader import Reader

    import farandole.data
    from farandole.data.transform import TransformSpec as own

    assert __version__ == "0.12.1"
    assert (make_batch_reader, Reader, TransformSpec) == (farandole.data.make_batch_reader, farandole.data.Reader, own)


def test_a_ranks_gpu_is_told_by_its_place(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from horovod.spark.task import get_available_devices

    assert get_available_devices() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("FARANDOLE_LOCAL_RANK", "1")
    assert get_available_devices() == ["1"], "the rank's own GPU is at its local rank among the visible ones"


def test_every_module_of_the_table_is_there_or_says_why(frameworks: None, installed: None) -> None:
    refused = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            refused[name] = str(error)
            assert isinstance(error, ModuleNotFoundError) == bool(missing_package(name))
            assert error.name is not None and (name.startswith(error.name) or error.name == missing_package(name))
    missing = {name: missing_module(name) for name in MODULES if missing_module(name) is not None}
    assert refused.keys() == missing.keys()
    # What is above a module is imported first, and speaks for itself.
    assert set(refused.values()) <= set(missing.values())
    assert {"horovod.ray.elastic", "horovod.runner.elastic"} <= refused.keys()
    assert not {"horovod.torch", "horovod.runner", "horovod.common.elastic", "horovod.keras.elastic"} & refused.keys()


def test_every_own_name_leads_to_something(frameworks: None, installed: None) -> None:
    there = {name: answer for name, answer in MODULES.items() if missing_module(name) is None}
    for name, answer in there.items():
        for attribute, where in answer.own.items():
            module, _, target = where.partition(":")
            assert getattr(importlib.import_module(name), attribute) is getattr(importlib.import_module(module), target)


WITHOUT = """
import contextlib, importlib, sys
sys.modules.update(dict.fromkeys({packages!r}))  # None there is what the import system takes for not installed
from farandole.compat import install
from farandole.compat.absent import missing_package
from farandole.compat.answers import MODULES
from farandole.compat.horovodrun import run_commandline
install()
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
        assert isinstance(error, ModuleNotFoundError) == bool(missing_package(name)), name
sys.exit(run_commandline(["--check-build"]))
"""


def test_without_any_framework_and_spark_each_module_names_what_to_install() -> None:
    packages = ("jax", "keras", "mxnet", "pyspark", "ray", "tensorflow", "torch")
    done = python(WITHOUT.format(packages=packages))
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    for module, package, extra in (
        ("horovod.torch", "torch", "torch"),
        ("horovod.mxnet", "mxnet", "mxnet"),
        ("horovod.spark", "pyspark", "spark"),
        ("sparkdl", "pyspark", "spark"),
        ("petastorm.spark", "pyspark", "spark"),
    ):
        assert f"{module} needs {package}, which is not installed: pip install 'farandole[{extra}]'" in said
    assert not any("No module named" in line for line in said)
    marks = {re.sub(r" [0-9].*", "", line[8:]): line[5] for line in said if line.startswith("    [")}
    assert (marks["NumPy"], marks["this machine"]) == ("X", "X")
    assert {marks[each] for each in ("PyTorch", "TensorFlow", "Keras", "JAX", "Spark")} == {" "}


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("from horovod.ray.elastic_v2 import ElasticAdapter", "import ElasticRayExecutor from horovod.ray"),
        ("from horovod.spark.common import util", "fit takes the DataFrame itself"),
        ("from horovod.spark.torch import remote", "it is the inside of Horovod's Spark jobs"),
        (
            "from horovod.spark.torch.datamodule import NVTabularDataModule",
            "NVTabularDataModule is not part of farandole",
        ),
        (
            "from horovod.torch.mpi_ops import HorovodAllreduce",
            "call the operation itself, which can be differentiated",
        ),
        ("from horovod.runner import _HorovodArgs", "call horovod.run, or start the command horovodrun"),
        ("from horovod.runner.launch import _run", "call horovod.run, or start the command horovodrun"),
        ("from horovod.runner.launch import _run_static", "call horovod.run, or start the command horovodrun"),
        ("from horovod.runner.launch import check_build", "horovodrun --check-build"),
        ("from horovod.common.elastic import notification_manager", "ask the launcher themselves; leave it out"),
        ("from horovod.spark.common.params import ModelParams", "derive a fitted model from TorchModel"),
        ("from horovod._keras.callbacks import MetricAverageCallbackImpl", "are in horovod.keras"),
        ("from horovod.torch import mpi_lib_v2", "call the functions of the binding"),
        ("from horovod.torch.mpi_ops import _handle_map", "call synchronize(handle)"),
        ("from horovod.runner.mpi_run import mpi_run", "it is the inside of Horovod's launcher"),
        (
            "from petastorm.spark.spark_dataset_converter import TorchDatasetContextManager",
            "call make_torch_dataloader of the converter",
        ),
        ("from horovod.runner.common.util import host_hash", "call cross_rank() after init()"),
        ("from horovod.runner.common.util.network import get_local_intfs", "set FARANDOLE_INTERFACE"),
        ("from petastorm.weighted_sampling_reader import WeightedSamplingReader", "sample the DataFrame"),
        (
            "from petastorm.spark.spark_dataset_converter import register_delete_dir_handler",
            "copies are removed by fsspec",
        ),
        ("from petastorm.ngram import NGram", "make windows of rows with Spark"),
        ("from petastorm.selectors import SingleIndexSelector", "give filters= or predicate= to the reader"),
        ("from petastorm.tools.copy_dataset import copy_dataset", "copy the data set with Spark, or as files"),
        ("import horovod.nothing_of_the_kind", "No module named 'horovod.nothing_of_the_kind'"),
        ("from horovod.torch import nothing_of_the_kind", "cannot import name 'nothing_of_the_kind'"),
    ],
)
def test_what_is_not_there_says_so(statement: str, sentence: str, installed: None) -> None:
    if "spark" in statement:
        pytest.importorskip("pyspark")
    with pytest.raises(ImportError) as raised:
        exec(statement, {})
    assert sentence in str(raised.value)


def test_names_of_horovods_that_are_not_there_are_called_by_their_name(installed: None) -> None:
    import horovod.torch.mpi_ops as hvd

    sentence = "horovod.torch.mpi_ops.HorovodAllreduce is not part of farandole"
    with pytest.raises(AttributeError, match=sentence):
        hvd.HorovodAllreduce  # noqa: B018
    with pytest.raises(ImportError, match=sentence):
        exec("from horovod.torch.mpi_ops import HorovodAllreduce", {})
    with pytest.raises(AttributeError, match=r"^module 'horovod.torch.mpi_ops' has no attribute 'nothing'$"):
        hvd.nothing  # noqa: B018


def test_a_module_is_answered_by_as_soon_as_it_is_there(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "horovod.novel", Module(by="farandole.novel", every=True))
    monkeypatch.setitem(ABSENT_MODULES, "horovod.novel", "it comes in a later version")
    sentence = "horovod.novel.functions is not part of farandole"
    assert (missing_module("horovod.novel.functions") or "").startswith(sentence)
    (tmp_path / "novel.py").write_text("__all__ = ['allreduce']\nallreduce = 'ours'\nhidden = 1\n")
    monkeypatch.setattr(farandole, "__path__", [*farandole.__path__, str(tmp_path)])
    try:
        hvd = importlib.import_module("horovod.novel")
        assert (hvd.__all__, hvd.allreduce, hasattr(hvd, "hidden")) == (["allreduce"], "ours", False)
    finally:
        sys.modules.pop("farandole.novel", None)
        vars(farandole).pop("novel", None)


def test_availability_can_be_asked_for(installed: None) -> None:
    """What Horovod's own packages did: there to be found, and an ImportError when imported."""
    assert importlib.util.find_spec("horovod") is not None
    assert importlib.util.find_spec("horovod.torch") is not None
    assert importlib.util.find_spec("horovod.mxnet") is not None
    assert importlib.util.find_spec("horovod.nothing_of_the_kind") is None


def test_star_imports(installed: None) -> None:
    scope: dict[str, object] = {}
    exec("from horovod.common.exceptions import *\nfrom horovod.torch import *", scope)
    assert {"HorovodInternalError", "HostsUpdatedInterrupt", "allreduce", "DistributedOptimizer"} <= scope.keys()


def test_a_function_that_is_sent_away_brings_the_answers_along(installed: None, tmp_path: Path) -> None:
    import horovod.common.util as util
    import horovod.version

    def answered() -> bool:
        return util.is_version_greater_equal_than(horovod.version.__version__, "0.28.1")

    parcel = tmp_path / "parcel"
    parcel.write_bytes(cloudpickle.dumps(answered))
    done = python(f"import pickle; print(pickle.load(open({str(parcel)!r}, 'rb'))())")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_folder_alone_is_enough_for_a_child() -> None:
    done = python("import horovod.common.process_sets as sets; print(sets.__doc__)", path=str(IMPORTABLE))
    assert (done.stdout, done.stderr) == ("Answered by farandole.core.process_sets.process_set.\n", "")
    done = python("from sparkdl.horovod import nothing_of_the_kind", path=str(IMPORTABLE))
    lacking = importlib.util.find_spec("pyspark") is None
    sentence = "sparkdl needs pyspark" if lacking else "cannot import name 'nothing_of_the_kind' from 'sparkdl.horovod'"
    assert sentence in done.stderr


def test_a_spawned_process_finds_the_answers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, farandole.compat\n"
        "farandole.compat.install()\n"
        "import horovod\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(eval, ('__import__(\"horovod.version\").__version__',)))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{VERSION}\n", "")


@pytest.fixture
def real_horovod(tmp_path: Path) -> Path:
    """What pip would have installed."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = '0.27.0'\n")
    (tmp_path / "horovod-0.27.0.dist-info").mkdir()
    (tmp_path / "horovod-0.27.0.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.27.0\n")
    return tmp_path


def test_a_real_horovod_is_not_hidden_silently(real_horovod: Path) -> None:
    code = "import farandole.compat; farandole.compat.install(); import horovod; print(horovod.__version__)"
    done = python(code, path=str(real_horovod))
    assert done.stdout == f"{VERSION}\n"
    where = real_horovod / "horovod" / "__init__.py"
    assert f"horovod 0.27.0 is installed ({where}) but hidden" in done.stderr
    # A process that finds the answers through the folder says so as well.
    done = python("import horovod; print(horovod.__version__)", path=f"{IMPORTABLE}:{real_horovod}")
    assert done.stdout == f"{VERSION}\n"
    assert "horovod 0.27.0 is installed" in done.stderr


def test_a_horovod_in_use_is_not_replaced(real_horovod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(real_horovod))
    importlib.import_module("horovod")
    try:
        with pytest.raises(ConfigError, match=r"horovod has been imported already, from .*before the first import"):
            install()
    finally:
        del sys.modules["horovod"]


def test_a_folder_of_scripts_named_horovod_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "horovod").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        install()
    uninstall()
    assert caplog.records == []


def test_exceptions_survive_pickle(installed: None) -> None:
    from horovod.common.exceptions import (
        HorovodInternalError,
        HorovodVersionMismatchError,
        HostsUpdatedInterrupt,
        get_version_mismatch_message,
    )

    for error in (
        HorovodInternalError("start over"),
        HostsUpdatedInterrupt(skip_sync=True),
        HorovodVersionMismatchError("torch", "2.0", "2.1"),
    ):
        got = pickle.loads(pickle.dumps(error))
        assert (type(got), str(got), vars(got)) == (type(error), str(error), vars(error))
    assert issubclass(HorovodInternalError, RuntimeError) and issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert issubclass(HorovodVersionMismatchError, ImportError)
    assert HostsUpdatedInterrupt(False).skip_sync is False
    assert str(HorovodVersionMismatchError("a", "1", "2")) == get_version_mismatch_message("a", "1", "2")


def test_uninstall_leaves_modules_that_load_late_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("the module was asked for its class, which would load it")

    monkeypatch.setitem(sys.modules, "late", Late())  # type: ignore[arg-type]
    install()
    uninstall()
