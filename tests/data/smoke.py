"""A short program for each framework: smoke.py NAME, as two ranks below `farandole run`, but for pandas and spark.

It uses nothing but an installed farandole and the framework. tools/matrix.py runs it."""

import os
import sys
import tempfile
from pathlib import Path


def numpy() -> None:
    import numpy

    import farandole.numpy as hvd

    hvd.init()
    found = hvd.allreduce(numpy.full(5, hvd.rank() + 1.0, "float32"), op=hvd.Sum)
    assert found.tolist() == [3.0] * 5, found
    assert hvd.allgather(numpy.array([hvd.rank()])).tolist() == [0, 1]


def torch() -> None:
    import torch

    import farandole.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.rand(4, 3)) ** 2).mean().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    distributed()


def distributed() -> None:
    import torch
    from torch import distributed as dist

    for backend in ("farandole", "cpu:farandole"):
        dist.init_process_group(backend)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        net(torch.rand(4, 3)).sum().backward()
        ranks = [None, None]
        dist.all_gather_object(ranks, dist.get_rank(), group=dist.new_group([0, 1]))
        assert ranks == [0, 1], ranks
        dist.destroy_process_group()


def tensorflow() -> None:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    hvd.init()
    weight = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient() -> object:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight) * float(hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape).gradient(loss, weight)

    assert gradient().numpy().tolist() == [3.0, 6.0]


def keras() -> None:
    import keras

    _fit(keras)


def tf_keras() -> None:
    import tf_keras

    _fit(tf_keras)


def _fit(keras: object) -> None:
    import numpy

    import farandole.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    rows = numpy.random.default_rng(hvd.rank()).random((16, 3)).astype("float32")
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(rows, rows[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[first])
    weights = hvd.allgather_object(model.get_weights()[0].tolist())
    assert weights[0] == weights[1]


def jax() -> None:
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    hvd.init()
    found = jax.jit(lambda x: hvd.allreduce(x * 2, op=hvd.Sum))(jnp.ones(3) * (hvd.rank() + 1))
    assert found.tolist() == [6.0] * 3, found


def lightning() -> None:
    import lightning
    import torch

    import farandole.torch as hvd
    from farandole.lightning import FarandoleStrategy

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: object, batch_idx: int) -> object:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])

        def configure_optimizers(self) -> object:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Line()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 1)), batch_size=2)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", strategy=FarandoleStrategy(), max_epochs=1, **options).fit(module, loader)
    weights = hvd.allgather(module.net.weight.detach())
    assert weights[0] == weights[1]


def pandas() -> None:
    """Read a data frame's Parquet file in shards, without ranks."""
    import pandas

    from farandole.data import Loader, ParquetSource

    with tempfile.TemporaryDirectory() as folder:
        pandas.DataFrame({"x": range(10)}).to_parquet(Path(folder) / "part.parquet")
        loader = Loader(ParquetSource(folder), batch_size=5, policy="drop")
        assert sum(int(batch["x"].sum()) for batch in loader) == 45


def spark() -> None:
    import pandas
    from pyspark.sql import SparkSession

    import farandole.spark

    def main() -> list[float]:
        import numpy

        import farandole.numpy as hvd

        hvd.init()
        return hvd.allreduce(numpy.ones(2), op=hvd.Sum).tolist()

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    assert session.createDataFrame(pandas.DataFrame({"x": [1, 2, 3]})).count() == 3
    assert farandole.spark.run(main, num_proc=2) == [[2.0, 2.0]] * 2
    session.stop()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    globals()[sys.argv[1]]()
