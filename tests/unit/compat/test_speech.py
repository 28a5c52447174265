"""Errors begin with the sentences that Horovod's programs look for, and end with ours."""

import importlib
from collections.abc import Iterator

import pytest

from farandole.compat import install, uninstall
from farandole.compat.speech import horovods_sentence
from farandole.errors import (
    CollectiveTimeout,
    ConfigError,
    EngineClosed,
    FarandoleError,
    InvalidRequest,
    MismatchError,
    NotInitializedError,
    PeerLost,
    RankFailed,
)

SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to"


def mismatch(what: str, *wishes: str) -> MismatchError:
    return MismatchError("grouped_allreduce.w_1of2", dict(enumerate(wishes)), what)


SAMPLES = [
    (NotInitializedError(), "Horovod has not been initialized; use hvd.init()."),
    (EngineClosed("shutdown() was called"), SHUT_DOWN),
    (PeerLost("allreduce.w", 3, "was killed"), SHUT_DOWN),
    (
        mismatch("dtype", "float32[2]", "float32[2]", "int32[2]"),
        "Mismatched data types: One rank had type float32, but another rank had type int32.",
    ),
    (
        mismatch("shape", "float32[2, 3]", "float32[2]"),
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], "
        "but another rank sent a tensor of shape [2].",
    ),
    (mismatch("operation", "allreduce", "allgather"), "Mismatched operations: One rank did an allreduce"),
    (
        mismatch("device", "CUDA tensor", "CPU tensor"),
        "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device GPU, "
        "but another rank specified device CPU.",
    ),
    (mismatch("reduce op", "sum", "min"), "Mismatched reduction operation: "),
    (mismatch("scale factors", "prescale 1, postscale 2", "prescale 1, postscale 1"), "Mismatched prescale and/or"),
    (MismatchError("broadcast.w", {0: "root 0", 1: "root 1"}, "root rank"), "Mismatched BROADCAST root ranks: "),
    (
        InvalidRequest("allreduce.w", "an operation of the same name is still in flight; wait for it"),
        "Requested to allreduce a tensor with the same name as another tensor that is currently being processed.",
    ),
    (RankFailed(1, "ValueError: no"), "Horovod detected that one or more processes exited with non-zero status"),
]
SILENT = [
    CollectiveTimeout("w", (1,), 3.0),
    ConfigError("spin", "no"),
    InvalidRequest("w", "splits is empty"),
    mismatch("group", "a of 1", "b of 2"),
    MismatchError("w", {}, "dtype"),
]


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


@pytest.mark.parametrize(("error", "sentence"), SAMPLES, ids=lambda each: type(each).__name__)
def test_horovods_sentence_comes_first_and_ours_stays(error: FarandoleError, sentence: str) -> None:
    ours = str(error)
    install()
    try:
        text = str(error)
    finally:
        uninstall()
    assert text.startswith(sentence)
    assert isinstance(error, NotInitializedError) or text.endswith(ours)
    assert str(error) == ours


@pytest.mark.parametrize("error", SILENT, ids=lambda each: type(each).__name__)
def test_other_errors_say_what_they_always_say(error: FarandoleError) -> None:
    ours = str(error)
    assert horovods_sentence(error) == ""
    install()
    try:
        assert str(error) == ours
    finally:
        uninstall()


def test_the_text_of_an_exited_process(installed: None) -> None:
    assert str(RankFailed(1, "no")).splitlines()[1:] == ["Process name: 1", "rank 1 failed: no"]


def test_before_init(installed: None) -> None:
    pytest.importorskip("torch")
    hvd = importlib.import_module("horovod.torch")
    for call in (hvd.size, hvd.rank, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous):
        with pytest.raises(ValueError, match=r"^Horovod has not been initialized; use hvd.init\(\)\.$"):
            call()
    with pytest.raises(hvd.HorovodInternalError, match="Horovod has not been initialized"):
        hvd.barrier()
