"""Rows for the trainers of estimators, in files like those that a Spark task feeds, and a step of training."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from farandole.core.public import is_initialized, rank
from farandole.estimators.trainers.rows import HASH, VALIDATES, fed_as


def shard_of(folder: Path, columns: dict[str, Any], validates: Any = None) -> Path:
    """Write columns to a file like those that are fed to a rank; return its path."""
    arrays = {fed_as(place): pa.array(values) for place, values in enumerate(columns.values())}
    arrays[HASH] = pa.array(range(len(next(iter(columns.values())))), pa.int64())
    if validates is not None:
        arrays[VALIDATES] = pa.array(validates, pa.int8())
    table = pa.table(arrays)
    path = folder / f"rows-{rank() if is_initialized() else 0}.arrow"
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return path


def points(count: int) -> dict[str, Any]:
    """Return `count` rows of two features x and a label y."""
    x = [[float(place % 7), float(place % 3)] for place in range(count)]
    return {"x": x, "y": [place / count for place in range(count)]}


def mine(columns: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a rank's share of the rows."""
    return {name: values[rank::size] for name, values in columns.items()}


def settled_torch() -> None:
    """Make an optimizer: torch's first one sets a variable of its compiler permanently. The body of a fixture."""
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())


def plain_step(
    model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any, sample_weights: Any
) -> Any:
    """Train on a batch as Horovod does if there is no `train_minibatch_fn`."""
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    optimizer.step()
    return outputs, loss
