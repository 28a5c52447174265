"""Errors cross processes and say what to do."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole import errors
from farandole.errors import (
    AuthenticationError,
    CacheError,
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
    DataError,
    EngineClosed,
    FabricError,
    FarandoleError,
    HorovodInternalError,
    HostsError,
    InvalidRequest,
    JoinedError,
    MismatchError,
    MissingExtra,
    NoDataAvailableError,
    NotInitializedError,
    PeerLost,
    PicklingError,
    RankFailed,
    ReaderError,
    RendezvousError,
    SlotsError,
    SlotsTimeout,
    SourceError,
    TraceError,
    UnsupportedReduction,
    spell_ranks,
)

# One of each, with the built-in class that it can be caught as, and what its text must say.
SAMPLES = [
    (ConfigError("spin", "must be >= 0, got -1"), ValueError, ["spin: must be >= 0, got -1"]),
    (
        MissingExtra("farandole.torch", "PyTorch", "torch", "torch"),
        ModuleNotFoundError,
        ["farandole.torch needs PyTorch: pip install 'farandole[torch]'"],
    ),
    (NotInitializedError(), ValueError, ["farandole has not been initialized; call init() first."]),
    (RendezvousError("nobody is there"), FarandoleError, ["nobody is there"]),
    (
        RendezvousError("2 of 4 ranks did not come", (1, 3), "10.0.0.1:4000"),
        FarandoleError,
        ["ranks 1 and 3", "10.0.0.1:4000", "FARANDOLE_START_TIMEOUT"],
    ),
    (
        AuthenticationError("it does not know this job's secret", where="10.0.0.9:7"),
        RendezvousError,
        ["10.0.0.9:7 is not a member of this job", "secret"],
    ),
    (
        RankFailed(2, "ValueError: no", "Traceback ...\nValueError: no", ("epoch 1", "epoch 2")),
        RuntimeError,
        ["rank 2 failed: ValueError: no", "Traceback ...", "epoch 1\nepoch 2"],
    ),
    (SlotsError(4, 2, "the cluster"), ValueError, ["4 ranks", "the cluster has 2", "at most 2"]),
    (SlotsTimeout(4, 2, "the cluster"), TimeoutError, ["4 ranks", "the cluster has 2", "at most 2"]),
    (HostsError({"h2": "no route", "h3": "wrong key"}), OSError, ["these hosts:\n  h2: no route\n  h3: wrong key"]),
    (
        PicklingError("main", "main.<locals>.lock", "cannot pickle '_thread.lock'"),
        TypeError,
        ["cannot send main", "main.<locals>.lock", "create it inside"],
    ),
    (ReaderError("has begun another pass"), RuntimeError, ["has begun another pass"]),
    (SourceError("s3://b/part.parquet", "has vanished"), ValueError, ["s3://b/part.parquet: has vanished"]),
    (TraceError("t.json", "event 3: is no JSON object"), ValueError, ["t.json: event 3: is no JSON object"]),
    (CacheError("/scratch", "is full"), OSError, ["cache /scratch: is full"]),
    (DataError("age", "is not there; the columns are id, name"), ValueError, ["column 'age'", "id, name"]),
    (DataError("age", "is not there"), RuntimeError, ["column 'age'"]),
    (NoDataAvailableError("", "2 rows for 3 shards"), DataError, ["2 rows for 3 shards"]),
    (CollectiveError("fc.weight", "went wrong"), FarandoleError, ["'fc.weight': went wrong"]),
    (InvalidRequest("fc.weight", "is not contiguous"), ValueError, ["'fc.weight': is not contiguous"]),
    (UnsupportedReduction("fc.weight", "supports Sum"), InvalidRequest, ["'fc.weight': supports Sum"]),
    (
        MismatchError("fc.weight", {0: "float32[10]", 1: "float32[10]", 3: "float32[9]"}, "shape"),
        CollectiveError,
        ["'fc.weight': shape differs", "ranks 0 and 1: float32[10]; rank 3: float32[9]", "use one shape"],
    ),
    (
        MismatchError("fc.weight", {0: "prescale 1", 1: "prescale 2"}, "scale factors"),
        CollectiveError,
        ["'fc.weight': scale factors differ between", "use the same scale factors on every rank"],
    ),
    (FabricError("fc.weight", "MPI_Test failed"), HorovodInternalError, ["'fc.weight': MPI_Test failed"]),
    (JoinedError("fc.weight", "rank 1 has joined"), HorovodInternalError, ["'fc.weight': rank 1 has joined"]),
    (
        CollectiveTimeout("grad", (2,), 600.0),
        TimeoutError,
        ["'grad': waited 600 s for rank 2", "FARANDOLE_COLLECTIVE_TIMEOUT", "FARANDOLE_STALL_SHUTDOWN_TIME"],
    ),
    (PeerLost("grad", 3, "was killed or crashed"), ConnectionError, ["rank 3 is lost (was killed or crashed)"]),
    (HorovodInternalError("start over"), RuntimeError, ["start over"]),
    (
        EngineClosed("shutdown() was called"),
        HorovodInternalError,
        ["the engine is closed: shutdown() was called", "init()"],
    ),
]


@pytest.mark.parametrize(("error", "base", "texts"), SAMPLES, ids=lambda each: type(each).__name__)
def test_says_what_happened_and_what_to_do(error: FarandoleError, base: type[Exception], texts: list[str]) -> None:
    assert isinstance(error, FarandoleError)
    assert isinstance(error, base)
    for text in texts:
        assert text in str(error)


@pytest.mark.parametrize("error", [each for each, _, _ in SAMPLES], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_survives_pickle(error: FarandoleError, protocol: int) -> None:
    error.add_note("seen by rank 7")

    got = pickle.loads(pickle.dumps(error, protocol))

    assert type(got) is type(error)
    assert str(got) == str(error)
    assert got.args == error.args
    assert vars(got) == vars(error)


def test_every_error_is_sampled_and_exported() -> None:
    classes = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, FarandoleError)}
    assert {type(each) for each, _, _ in SAMPLES} == classes - {FarandoleError}
    assert set(errors.__all__) == {each.__name__ for each in classes} | {"spell_ranks"}
    for each in classes:
        assert each.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("error", [each for each, _, _ in SAMPLES], ids=lambda each: type(each).__name__)
def test_horovods_programs_catch_what_is_not_wrong_with_the_call(error: FarandoleError) -> None:
    kinds = (
        HorovodInternalError,
        NotInitializedError,
        MismatchError,
        JoinedError,
        FabricError,
        CollectiveTimeout,
        PeerLost,
        EngineClosed,
    )
    assert isinstance(error, HorovodInternalError) == (type(error) in kinds)
    assert not isinstance(error, HorovodInternalError) or isinstance(error, RuntimeError)


def test_a_peer_without_a_name_is_lost_between_operations() -> None:
    assert "its own output says why" in str(PeerLost("", 1, "its process was killed or crashed"))
    left = str(PeerLost("x", 1, "it has shut down"))
    assert left.startswith("'x': rank 1 is lost (it has shut down); its program ended") and "output" not in left


def test_a_subclass_of_a_user_keeps_its_text() -> None:
    assert str(FarandoleError("my own words")) == "my own words"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([2, 0, 1], "ranks 0-2"),
        ([0, 1, 2, 5], "ranks 0-2 and 5"),
        ([7, 1, 3, 4, 5, 6], "ranks 1 and 3-7"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
    ],
)
def test_ranks_are_spelled_for_people(ranks: list[int], text: str) -> None:
    assert spell_ranks(ranks) == text


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spelled_ranks_can_be_read_back(ranks: set[int]) -> None:
    words = spell_ranks(ranks).replace("ranks ", "").replace("rank ", "").replace(" and ", ", ").split(", ")
    ends = [[int(each) for each in word.split("-")] for word in words]
    assert {rank for run in ends for rank in range(run[0], run[-1] + 1)} == ranks
