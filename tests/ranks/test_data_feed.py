"""Rows that lie on the ranks: every row once per epoch, as many steps on every rank, one refusal for all."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa

import farandole.numpy as hvd
from farandole.core.context import Context
from farandole.data import (
    Batch,
    FeedLoader,
    FieldOptions,
    Loader,
    ParquetSource,
    Policy,
    Ragged,
    Reading,
    SelectedSource,
    ShardSource,
    SparseRows,
)
from farandole.data.loading.rounds import Columns
from farandole.errors import ConfigError, DataError, FarandoleError, SourceError
from helpers.datasets import write_rows
from helpers.ranks import run_ranks

# Rows of record batches, by partition; a job has as many ranks as there are, or the first of them only.
PARTITIONS: dict[str, list[list[int]]] = {
    "even": [[20, 20], [20, 20], [20, 20], [20, 20], [20, 20]],
    "ragged": [[31, 2], [1], [17, 17, 5, 9], [40], [3]],
    "some empty": [[12, 0, 7], [], [30, 3], [0], [1]],
    "one large": [[1], [200], [1], [1], [1]],
    "many small": [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8], [9, 7], [9, 3, 2, 3, 8], [4, 6, 2, 6]],
    "fewer rows than ranks": [[1], [], [1], [], []],
}
VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def write_shards(folder: Path, sizes: list[list[int]], make: Callable[[int, int], pa.Table] | None = None) -> int:
    """Write rank r's rows to the file r.arrow; by default their numbers, over all ranks, as column "row"."""
    made = make or (lambda first, rows: pa.table({"row": np.arange(first, first + rows)}))
    first = 0
    for rank, batches in enumerate(sizes):
        with pa.ipc.new_stream(folder / f"{rank}.arrow", made(0, 1).schema) as writer:
            for rows in batches:
                for batch in made(first, rows).combine_chunks().to_batches():
                    writer.write_batch(batch)
                first += rows
    return first


def make(
    context: Context, folder: Path, *, batch_size: int = 4, policy: Policy = "join", **settings: Any
) -> FeedLoader:
    return FeedLoader(
        ShardSource(folder / f"{context.rank}.arrow"),
        batch_size=batch_size,
        policy=policy,
        rank=context.rank,
        size=context.size,
        reading=Reading(**settings),
        gather=hvd.allgather_object,
    )


def rows_of(batches: list[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch["row"]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("partitions", PARTITIONS)
def test_no_row_is_short_and_none_doubled(tmp_path: Path, partitions: str, size: int) -> None:
    epochs = 3
    rows = write_shards(tmp_path, PARTITIONS[partitions][:size])
    ranks = run_ranks(size, lambda context: _epochs(make(context, tmp_path), epochs))
    for epoch in range(epochs):
        assert len({len(seen[epoch]) for seen in ranks}) == 1
        assert Counter(row for seen in ranks for row in rows_of(seen[epoch])) == Counter(range(rows))
    if rows > 20:
        assert len({tuple(row for seen in ranks for row in rows_of(seen[epoch])) for epoch in range(epochs)}) == epochs


def _epochs(loader: FeedLoader, epochs: int) -> list[list[Batch]]:
    return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("partitions", ["even", "ragged", "many small", "one large"])
@pytest.mark.parametrize("policy", ["drop", "pad", "join"])
def test_policies_keep_their_word(tmp_path: Path, policy: Policy, partitions: str) -> None:
    sizes = PARTITIONS[partitions][:3]
    rows, held = write_shards(tmp_path, sizes), [sum(each) for each in sizes]
    size = 1 if policy == "drop" else 6  # of which every rank can make a step
    ranks = run_ranks(3, lambda context: list(make(context, tmp_path, batch_size=size, policy=policy)))
    steps = min(held) if policy == "drop" else -(-max(held) // 6)
    assert [len(batches) for batches in ranks] == [steps] * 3
    assert all(len(batch["row"]) == batch.rows for batches in ranks for batch in batches)
    for at in zip(*ranks, strict=True):
        # The average over ranks of mean times weight is the mean over all rows of the step.
        means = [batch["row"].mean() * batch.weight if batch.rows else 0.0 for batch in at]  # type: ignore[union-attr]
        assert sum(means) / 3 == pytest.approx(np.concatenate([np.asarray(batch["row"]) for batch in at]).mean())
    real = [int(row) for batches in ranks for batch in batches for row in batch["row"][: batch.rows - batch.repeated]]  # type: ignore[union-attr]
    assert max(Counter(real).values()) == 1
    if policy == "join":
        assert len(real) == rows
        assert max(batch.rows for batches in ranks for batch in batches) <= 6
        return
    assert {batch.rows for batches in ranks for batch in batches} == {size}
    assert len(real) == (3 * steps if policy == "drop" else rows)
    first = np.cumsum([0, *held])
    for rank, batches in enumerate(ranks):
        assert set(rows_of(batches)) <= set(range(first[rank], first[rank + 1]))  # repeats its own


def test_the_order_is_a_function_of_seed_epoch_and_rank(tmp_path: Path) -> None:
    write_shards(tmp_path, PARTITIONS["even"][:2])

    def orders(context: Context) -> list[list[int]]:
        first, other = make(context, tmp_path), make(context, tmp_path, seed=5)
        again = make(context, tmp_path)
        again.set_epoch(1)
        seen = [*_epochs(first, 2), list(again), list(other), list(make(context, tmp_path, shuffle=False))]
        return [[row - 40 * context.rank for row in rows_of(batches)] for batches in seen]

    for one, two, two_again, other, plain in (ranks := run_ranks(2, orders)):
        assert two == two_again
        assert plain == list(range(40))
        assert sorted(one) == sorted(two) == sorted(other) == plain
        assert len({tuple(each) for each in (one, two, other, plain)}) == 4
    assert ranks[0][0] != ranks[1][0]


@pytest.mark.parametrize("policy", ["drop", "pad", "join"])
def test_an_epoch_goes_on_where_it_was_left_over_the_same_rows_only(tmp_path: Path, policy: Policy) -> None:
    folders = [tmp_path / name for name in ("same", "turned")]
    for folder, sizes in zip(folders, ([[17, 5], [9, 8, 1]], [[5, 17], [9, 8, 1]]), strict=True):
        folder.mkdir()
        write_shards(folder, sizes)

    def body(context: Context) -> dict[str, int]:
        loader = make(context, folders[0], policy=policy)
        list(loader)
        whole = make(context, folders[0], policy=policy)
        whole.set_epoch(1)
        expected = rows_of(list(whole))
        batches = iter(loader)
        seen = rows_of([next(batches) for _ in range(2)])
        batches.close()  # type: ignore[attr-defined]
        state = loader.state_dict()
        resumed = make(context, folders[0], policy=policy)
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole) - 2
        assert seen + rows_of(list(resumed)) == expected
        assert resumed.epoch == 2
        other = make(context, folders[1], policy=policy)
        with pytest.raises(ConfigError, match=r"2 steps into epoch 1 of other rows.*set_epoch\(1\)"):
            other.load_state_dict(state)
        other.load_state_dict(resumed.state_dict())  # the beginning of an epoch is one for any rows
        assert other.epoch == 2
        with pytest.raises(ConfigError, match="has seed 0, but this loader 3"):
            make(context, folders[0], policy=policy, seed=3).load_state_dict(state)
        return state

    one, two = run_ranks(2, body)
    assert one == two


def test_columns_are_what_the_rows_of_all_ranks_are(tmp_path: Path) -> None:
    """Lengths and vectors differ between ranks, and deep within one; a rank has no rows at all."""

    def rows(first: int, count: int) -> pa.Table:
        numbers = list(range(first, first + count))
        return pa.table(
            {
                "row": pa.array(numbers, pa.int64()),
                "pair": pa.array([[row, -row] for row in numbers], pa.list_(pa.int64())),
                "some": pa.array([[1.0] * (2 if row == 37 else 1) for row in numbers], pa.list_(pa.float64())),
                "vector": pa.array(
                    [
                        {"type": 0, "size": 2, "indices": [1], "values": [5.0]}
                        if row == 41
                        else {"type": 1, "size": None, "indices": None, "values": [float(row), 0.0]}
                        for row in numbers
                    ],
                    VECTOR,
                ),
            }
        )

    write_shards(tmp_path, [[10, 5], [], [20, 15]], rows)

    def body(context: Context) -> list[int]:
        loader = make(context, tmp_path)
        assert loader.kinds == {
            "row": "int64",
            "pair": "int64[2]",
            "some": "double[different lengths]",
            "vector": "sparse float64[2]",
        }
        seen = []
        for batch in loader:
            assert isinstance(batch["some"], Ragged) and isinstance(batch["vector"], SparseRows)
            assert np.array_equal(batch["pair"], np.stack([batch["row"], -batch["row"]], axis=1))  # type: ignore[operator, arg-type]
            assert [len(each) for each in batch["some"].rows()] == [2 if row == 37 else 1 for row in batch["row"]]
            wanted = [[0.0, 5.0] if row == 41 else [float(row), 0.0] for row in batch["row"]]
            assert batch["vector"].dense().tolist() == wanted
            seen += rows_of([batch])
        return seen

    assert sorted(row for seen in run_ranks(3, body) for row in seen) == list(range(50))


def _numbers(first: int, rows: int) -> pa.Table:
    return pa.table({"row": pa.array([None if first + row == 7 else row for row in range(rows)], pa.int64())})


@pytest.mark.parametrize(
    ("sizes", "rows", "settings", "problem"),
    [
        ([[0], []], None, {}, "there are no rows on any of 2 ranks"),
        ([[5], [5]], _numbers, {}, r"'row': 1 of 10 rows are null; .*nulls={'row': ...}"),
        ([[5], [3]], None, {"policy": "drop"}, r"ranks hold 5, 3 rows, which make no step of 4 on each"),
        ([[5], []], None, {"policy": "pad"}, "5 rows for 2 ranks: some have none to repeat"),
        (
            [[5], [5]],
            lambda first, rows: pa.table({"x": [{"a": 1}] * rows}),
            {},
            r"no tensor holds any column: x \(struct",
        ),
        (
            [[5], []],
            lambda first, rows: pa.table({"x": [["a"]] * rows}),
            {},
            r"no tensor holds any column: x \(list<\w+: string",
        ),
        ([[5], [5]], None, {"fields": FieldOptions(ragged=["x"])}, "ragged: 'x' is not among the columns"),
    ],
    ids=["no rows", "null on one rank", "drop", "pad", "struct", "texts", "option"],
)
def test_what_is_wrong_with_one_ranks_rows_all_ranks_raise(
    tmp_path: Path, sizes: list[list[int]], rows: Any, settings: dict[str, Any], problem: str
) -> None:
    write_shards(tmp_path, sizes, rows)

    def body(context: Context) -> str:
        with pytest.raises((DataError, ConfigError), match=problem) as caught:
            make(context, tmp_path, **settings)
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1


def test_a_rank_that_cannot_look_at_its_rows_stops_all(tmp_path: Path) -> None:
    write_shards(tmp_path, [[3], [3]])

    def body(context: Context) -> str:
        source = ShardSource(tmp_path / f"{context.rank}.arrow")
        if context.rank == 1:
            source.schema = pa.schema([("other", pa.int64())])
        with pytest.raises(FarandoleError) as caught:
            FeedLoader(
                source,
                batch_size=1,
                policy="join",
                columns=["row"],
                rank=context.rank,
                size=2,
                gather=hvd.allgather_object,
            )
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert "column 'row': is not in the data, which has other" in second
    assert first == f"rank 1: {second}"


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("policy", ["drop", "pad", "join"])
def test_what_one_ranks_transform_raises_stops_all_at_one_step_and_costs_no_row(
    tmp_path: Path, policy: Policy, size: int, workers: int
) -> None:
    sizes = [[4] * 6, [4] * 5, [4] * 4][:size]
    rows, last = write_shards(tmp_path, sizes), size - 1
    bad = rows - sum(sizes[last]) + 8  # the first row of the last rank's third record batch

    def body(context: Context) -> dict[str, int]:
        refused = {bad}

        def transform(columns: Columns) -> Columns:
            if refused.intersection(columns["row"].tolist()):  # type: ignore[union-attr]
                raise KeyError("colour")
            return columns

        loader = make(context, tmp_path, policy=policy, shuffle=False, workers=workers, transform=transform)
        error, text = (KeyError, "^'colour'") if context.rank == last else (SourceError, f"^rank {last}: KeyError: ")
        seen: list[Batch] = []
        with pytest.raises(error, match=text):
            for batch in loader:
                seen.append(batch)
        # The ranks are still together, and can go on from the last step that all of them had.
        assert hvd.allgather_object(context.rank) == list(range(size))
        state = loader.state_dict()
        refused.clear()
        seen += list(loader)
        assert rows_of(seen) == rows_of(list(make(context, tmp_path, policy=policy, shuffle=False)))
        return state

    states = run_ranks(size, body)
    # A rank of fewer rows spreads them over the 6 steps: the third of 3 takes 0 to 2, 2 to 5, 5 to 8, and fails at 8.
    steps = 3 if (policy, size) == ("join", 3) else 2
    assert [(state["epoch"], state["visited"]) for state in states] == [(0, steps)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_word_that_one_rank_does_not_know_all_hear_of_at_one_step(tmp_path: Path, size: int) -> None:
    def words(first: int, rows: int) -> pa.Table:
        return pa.table({"row": range(first, first + rows), "word": ["red" if first != 8 else "odd"] * rows})

    write_shards(tmp_path, [[4] * 4] * size, words)

    def body(context: Context) -> int:
        fields = FieldOptions(vocabulary={"word": ["red"]})
        loader = make(context, tmp_path, policy="drop", shuffle=False, fields=fields, workers=0, ahead=0)
        batches = iter(loader)
        assert [next(batches).rows, next(batches).rows] == [4, 4]
        error, text = (SourceError, "^rank 0: ") if context.rank else (DataError, "^")
        with pytest.raises(error, match=f"{text}column 'word': .*'odd' is not in its vocabulary of 1 words"):
            next(batches)
        return loader.state_dict()["visited"]

    assert run_ranks(size, body) == [2] * size


def test_what_fails_on_one_rank_before_the_first_step_fails_on_all(tmp_path: Path) -> None:
    for rank in range(2):
        write_rows(tmp_path / str(rank), [[5], [5]])

    def body(context: Context) -> None:
        def transform(columns: Columns) -> Columns:
            raise KeyError("colour")

        loader = FeedLoader(
            ParquetSource(str(tmp_path / str(context.rank))),
            batch_size=5,
            policy="drop",
            rank=context.rank,
            size=2,
            reading=Reading(transform=transform if context.rank else dict),
            gather=hvd.allgather_object,
        )
        error, text = (KeyError, "^'colour'") if context.rank else (SourceError, "^rank 1: KeyError: 'colour'")
        with pytest.raises(error, match=text):
            loader.sample()
        if context.rank:
            (tmp_path / "1" / "part-001.parquet").unlink()
        whose = "" if context.rank else "rank 1: "
        with pytest.raises(SourceError, match=rf"^{whose}.*/1/part-001.parquet: is not there"):
            next(iter(loader))

    run_ranks(2, body)


def test_nulls_and_choices_are_as_for_files(tmp_path: Path) -> None:
    write_shards(tmp_path, [[10, 10], [20]])

    def body(context: Context) -> list[int]:
        source = ShardSource(tmp_path / f"{context.rank}.arrow")
        train = SelectedSource(source, [("row", "<", 25)])
        loader = FeedLoader(train, batch_size=4, policy="join", rank=context.rank, size=2, gather=hvd.allgather_object)
        with pytest.raises(ConfigError, match="use FeedLoader"):
            Loader(train, batch_size=4, policy="join", rank=context.rank, size=2)
        return rows_of(list(loader))

    assert sorted(row for seen in run_ranks(2, body) for row in seen) == list(range(25))
    write_shards(tmp_path, [[9]], _numbers)
    loader = FeedLoader(
        ShardSource(tmp_path / "0.arrow"),
        batch_size=4,
        policy="join",
        reading=Reading(shuffle=False, fields=FieldOptions(nulls={"row": -1})),
    )
    assert rows_of(list(loader)) == [0, 1, 2, 3, 4, 5, 6, -1, 8]


def test_ranks_that_ask_for_different_things_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [[3], [3]])

    def body(context: Context) -> None:
        with pytest.raises(ConfigError, match=r"the loader: differs between ranks \(rank 0: .*rank 1: .*batch_size 2"):
            make(context, tmp_path, batch_size=1 + context.rank)

    run_ranks(2, body)
    source = ShardSource(tmp_path / "0.arrow")
    with pytest.raises(ConfigError, match="gather: is needed"):
        FeedLoader(source, batch_size=1, policy="join", size=2)
    with pytest.raises(ConfigError, match=r"rank: must be in 0\.\.0"):
        FeedLoader(source, batch_size=1, policy="join", rank=1)
    with pytest.raises(ConfigError, match="batch_size"):
        FeedLoader(source, batch_size=0, policy="join")


def test_batches_without_rows_are_of_the_types_that_a_transform_makes(tmp_path: Path) -> None:
    write_shards(tmp_path, [[20], [2], []])

    def double(columns: Columns) -> Columns:
        return {"twice": np.array([int(row) * 2 for row in columns["row"]], None if len(columns["row"]) else bool)}

    def body(context: Context) -> list[tuple[int, str]]:
        loader = make(context, tmp_path, transform=double)
        assert {str(batch["twice"].dtype) for batch in loader} == {str(loader.sample()["twice"].dtype)}  # type: ignore[union-attr]
        return [(batch.rows, str(batch["twice"].dtype)) for batch in loader]  # type: ignore[union-attr]

    full, few, none = run_ranks(3, body)
    assert full == [(4, "int64")] * 5
    assert sorted(few) == [(0, "int64")] * 3 + [(1, "int64")] * 2
    assert none == [(0, "bool")] * 5
