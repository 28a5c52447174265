"""Check of all collectives against NumPy, as the body of a rank."""

import numpy as np

import farandole.numpy as hvd
from farandole.core.context import Context

LENGTHS = (1, 1000, 60_001)  # one for a single hop, one long enough for pipelines


def check_collectives(context: Context) -> None:
    """Run each collective with few and with many elements; raise `AssertionError` for a wrong result."""
    for length in LENGTHS:
        _check_reductions(context.rank, context.size, length)
        _check_movement(context.rank, context.size, length)
    hvd.barrier()


def _values(rank: int, length: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng([rank, length]).integers(0, 5, length).astype(dtype)


def _check_reductions(rank: int, size: int, length: int) -> None:
    for dtype in (np.float32, np.int64, np.float16):
        inputs = [_values(each, length, dtype) for each in range(size)]
        total = sum(inputs)
        np.testing.assert_array_equal(hvd.allreduce(inputs[rank], op=hvd.Sum), total)
        np.testing.assert_array_equal(hvd.allreduce(inputs[rank], op=hvd.Max), np.max(inputs, axis=0))
        np.testing.assert_allclose(hvd.allreduce(inputs[rank], op=hvd.Average), total // size, atol=1)
        rows = np.array_split(total, size)
        np.testing.assert_array_equal(hvd.reducescatter(inputs[rank], op=hvd.Sum), rows[rank])
    grouped = hvd.grouped_allreduce([_values(rank, length), _values(rank, 7)], op=hvd.Sum)
    for result, count in zip(grouped, (length, 7), strict=True):
        np.testing.assert_array_equal(result, sum(_values(each, count) for each in range(size)))


def _check_movement(rank: int, size: int, length: int) -> None:
    # Different lengths; some ranks send nothing.
    inputs = [_values(each, each % 3 * length) for each in range(size)]
    np.testing.assert_array_equal(hvd.allgather(inputs[rank]), np.concatenate(inputs))
    for root in {0, size - 1}:
        np.testing.assert_array_equal(hvd.broadcast(_values(rank, length), root), _values(root, length))
    splits = [[(source + 2 * target) % 3 * length for target in range(size)] for source in range(size)]
    sent = [_values(source, sum(splits[source])) for source in range(size)]
    starts = np.cumsum([[0, *row[:-1]] for row in splits], axis=1)
    received, counts = hvd.alltoall(sent[rank], splits=np.array(splits[rank]))
    expected = [sent[source][starts[source][rank] :][: splits[source][rank]] for source in range(size)]
    np.testing.assert_array_equal(received, np.concatenate(expected))
    np.testing.assert_array_equal(counts, [splits[source][rank] for source in range(size)])
