"""Train from Parquet files, stop in the middle of an epoch, and continue with another number of ranks.

    farandole run -np 4 python examples/data_parquet.py --folder digits --state state.json --steps 5
    farandole run -np 2 python examples/data_parquet.py --folder digits --state state.json --steps 5
    farandole run -np 3 python examples/data_parquet.py --folder digits --state state.json

The first run writes scikit-learn's handwritten digits to `digits`. Each run continues where the one before stopped, and
the last one ends after two epochs. In each epoch every row is in exactly one batch of one rank.
"""

import argparse
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd
from farandole.data import Loader, ParquetSource
from farandole.torch.data import TensorLoader

FILES = 3


def write_digits(folder: Path) -> None:
    """Write Parquet files with row groups of different sizes; `folder` exists only when it is complete."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir(parents=True)
    digits = load_digits()
    rows = pa.table({"pixels": digits.data.astype("float32").tolist(), "label": digits.target})
    rows = rows.set_column(0, "pixels", rows["pixels"].cast(pa.list_(pa.float32(), 64)))
    for number in range(FILES):
        part = rows.slice(number * 450, 450 if number + 1 < FILES else None)
        pq.write_table(part, unfinished / f"part-{number}.parquet", row_group_size=100 + 33 * number)
    unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="weights lie beside it")
    parser.add_argument("--steps", type=int, help="stop after so many; by default after two epochs")
    options = parser.parse_args()
    weights = options.state.with_suffix(".pt")

    hvd.init()
    if hvd.rank() == 0 and not options.folder.exists():
        write_digits(options.folder)
    hvd.barrier()
    loader = TensorLoader(
        Loader(
            ParquetSource(str(options.folder)),
            batch_size=32,
            policy="join",
            rank=hvd.rank(),
            size=hvd.size(),
            gather=hvd.allgather_object,
        )
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    if options.state.exists():
        loader.load_state_dict(json.loads(options.state.read_text()))
        model.load_state_dict(torch.load(weights))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    steps = rows = 0
    loss = torch.zeros(())
    while loader.loader.epoch < 2 and steps != options.steps:
        for batch in loader:
            optimizer.zero_grad()
            # The mean over no rows would be NaN; their sum is 0, and so are its gradients.
            loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["label"], reduction="sum")
            (loss / max(1, batch.rows) * batch.weight).backward()
            optimizer.step()
            steps, rows = steps + 1, rows + batch.rows
            if steps == options.steps:
                break
    everyones = sum(hvd.allgather_object(rows))
    if hvd.rank() == 0:
        options.state.write_text(json.dumps(loader.state_dict()))
        torch.save(model.state_dict(), weights)
        print(f"{steps} steps, {everyones} rows on {hvd.size()} ranks; state {loader.state_dict()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
