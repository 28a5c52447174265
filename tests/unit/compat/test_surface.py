"""What programs call, as Horovod 0.28.1 has it: names, order of arguments, defaults."""

import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator

import api_table
import pytest
from api_table import differing, find, render
from mxnet_stand_in import mxnet_stand_in

from farandole.compat import install, interface, uninstall
from farandole.compat.absent import missing_package

pytest.importorskip("torch")

INTERFACE = interface.read_interface(interface.INTERFACE.read_text(encoding="utf-8"))
MODULES = list(dict.fromkeys(entry.module for entry in INTERFACE))


@pytest.fixture(autouse=True)
def installed(frameworks: None) -> Iterator[None]:
    with mxnet_stand_in():
        install()
        yield
        uninstall()


@pytest.mark.parametrize("module", MODULES)
def test_each_name_is_there_or_says_why_not(module: str) -> None:
    if module not in (interface.COMMAND, interface.ENVIRONMENT) and (package := missing_package(module)):
        pytest.skip(f"{package} is not installed")
    found = [(entry, find(entry)) for entry in INTERFACE if entry.module == module]
    assert [f"{entry.name} {finding.problem}" for entry, finding in found if finding.problem] == []
    assert [(entry.name, finding) for entry, finding in found if finding != interface.declared(entry)] == []


def test_the_page_is_what_is_there() -> None:
    for package in ("pyspark", "tensorflow", "keras"):
        pytest.importorskip(package)
    page = render([(entry, find(entry)) for entry in INTERFACE])
    assert page == api_table.PAGE.read_text(encoding="utf-8"), "run python tools/api_table.py"


@pytest.mark.parametrize(
    ("theirs", "ours", "problem"),
    [
        ("a, b=1", lambda a, b=1: None, ""),
        ("a, b=1", lambda a, b=1, c=2, *, d=3, **more: None, ""),
        ("a, b", lambda a, b=1: None, ""),
        ("a, *b, c=None, **d", lambda a, *b, c=None, **d: None, ""),
        ("a={}, b=Compression.none, c=Sum", lambda a=None, b=None, c=1: None, ""),
        ("a, b=1", lambda b=1, a=2: None, "takes a at another place"),
        ("a, b=1", lambda a, *, b=1: None, "takes b at another place"),
        ("a, b=1", lambda a, x=1: None, "takes no b"),
        ("a, b=1", lambda a, b=2: None, "has 2 as b, not 1"),
        ("a, b=1", lambda a, b=True: None, "has True as b, not 1"),
        ("a, b=1", lambda a, b: None, "as b, not 1"),
        ("a", lambda a, b: None, "needs b"),
        ("*, a=1", lambda a=1: None, ""),
        ("a, **b", lambda a: None, "takes no **b"),
    ],
)
def test_what_counts_as_the_same_arguments(theirs: str, ours: Callable[..., None], problem: str) -> None:
    said = differing(theirs, list(inspect.signature(ours).parameters.values()))
    assert said == problem or (problem and said.endswith(problem))


def test_a_file_with_a_slip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2 .*: whatever this is"):
        interface.read_interface("[horovod]\nwhatever this is\n")


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


def test_what_modules_of_estimators_hand_on() -> None:
    for package in ("pyspark", "keras", "lightning_utilities"):
        pytest.importorskip(package)
    from farandole.estimators.params import EstimatorParams

    modules = [importlib.import_module(f"horovod.spark.{name}.estimator") for name in ("torch", "keras", "lightning")]
    assert [module.EstimatorParams for module in modules] == [EstimatorParams] * 3
    extras = tomllib.loads((api_table.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"lightning>={modules[2].MIN_PL_VERSION}" in extras["lightning"]


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
