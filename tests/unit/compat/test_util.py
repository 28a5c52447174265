"""The functions of `horovod.common.util`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.compat import children
from farandole.compat import horovod_util as util


@given(st.lists(st.integers()), st.integers(1, 20))
def test_split_list(items: list[int], parts: int) -> None:
    split = util.split_list(items, parts)
    assert len(split) == parts
    assert [item for part in split for item in part] == items
    sizes = [len(part) for part in split]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(st.integers(-3, 70))
def test_powers_of_two(number: int) -> None:
    assert util.num_rank_is_power_2(number) == (number in (1, 2, 4, 8, 16, 32, 64))


@pytest.mark.parametrize(
    ("version", "target", "is_new_enough"),
    [
        ("1.10.0", "1.9.0", True),
        ("1.9", "1.9.1", False),
        ("2.13.0+cpu", "2.13.0", True),
        ("1.13.0a1", "1.13.0", True),
        ("0.28.1+farandole.0.1.0", "0.28.2", False),
        ("dev", "0.0.1", False),
    ],
)
def test_versions(version: str, target: str, is_new_enough: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is is_new_enough


def test_a_target_has_three_numbers() -> None:
    with pytest.raises(ValueError, match=r"written as 1\.2\.3, got '1\.9'"):
        util.is_version_greater_equal_than("1.9.0", "1.9")


def test_what_is_built() -> None:
    assert (util.gloo_built(), util.mpi_built(), util.nccl_built(), util.ddl_built(), util.ccl_built()) == (
        1,
        0,
        0,
        0,
        0,
    )
    assert util.gpu_available("torch") is True
    assert not util.extension_available("caffe")
    with pytest.raises(ImportError, match=r"Extension horovod\.caffe has not been built"):
        util.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__)
    assert util.get_extension_full_path("/a/b.py", "lib") == f"/a/lib{util.get_ext_suffix()}"


def test_an_installed_framework_is_an_extension() -> None:
    pytest.importorskip("torch")
    assert util.extension_available("torch")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    util.check_installed_version("torch", "1.0")
    assert util.is_iterable("ab") and not util.is_iterable(3)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "6"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "6"}, (5, 6)),
    ],
)
def test_the_launchers_variables_tell_rank_and_size_before_init(
    variables: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_alone(variables, monkeypatch)
    assert children.get_env_rank_and_size() == place


def test_a_rank_without_a_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    set_alone({"HOROVOD_RANK": "1"}, monkeypatch)
    with pytest.raises(RuntimeError, match="HOROVOD_RANK and HOROVOD_SIZE belong together"):
        children.get_env_rank_and_size()


def set_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{prefix}_RANK", raising=False)
        monkeypatch.delenv(f"{prefix}_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
