"""The flows of HorovodRunner's public notebooks, on the digits, by the imports that they have."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("sklearn")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import torch
from pyspark.sql import SparkSession

from farandole.compat import install, uninstall

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def warm_torch() -> None:
    # The first optimizer makes torch set a variable of its compiler, for good.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())


@pytest.fixture(autouse=True)
def installed(spark: SparkSession) -> Iterator[None]:
    install()
    yield
    uninstall()


def test_keras(frameworks: None, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorflow")
    from sparkdl import HorovodRunner

    checkpoint_dir = str(tmp_path / f"{time.time()}")
    Path(checkpoint_dir).mkdir()

    def get_dataset(num_classes: int, rank: int = 0, size: int = 1) -> tuple[Any, Any]:
        from sklearn.datasets import load_digits
        from tensorflow import keras

        digits = load_digits()
        images, labels = digits.images[rank::size, ..., None].astype("float32") / 16, digits.target[rank::size]
        held = len(labels) // 5
        labels = keras.utils.to_categorical(labels, num_classes)
        return (images[held:], labels[held:]), (images[:held], labels[:held])

    def get_model(num_classes: int) -> Any:
        from tensorflow.keras import layers, models

        return models.Sequential(
            [
                layers.Conv2D(16, 3, activation="relu", input_shape=(8, 8, 1)),
                layers.MaxPooling2D(2),
                layers.Dropout(0.1),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(num_classes, activation="softmax"),
            ]
        )

    def train_hvd(learning_rate: float = 1.0) -> list[float]:
        import horovod.tensorflow.keras as hvd
        import tensorflow as tf
        from tensorflow import keras

        hvd.init()
        gpus = tf.config.experimental.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        train, test = get_dataset(10, hvd.rank(), hvd.size())
        model = get_model(10)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(learning_rate=learning_rate * hvd.size()))
        model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=["accuracy"])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if hvd.rank() == 0:
            path = checkpoint_dir + "/checkpoint-{epoch}.weights.h5"
            callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
        fitted = model.fit(*train, 64, epochs=8, verbose=2, callbacks=callbacks, validation_data=test)
        accuracies: list[float] = fitted.history["val_accuracy"]
        return accuracies

    assert HorovodRunner(np=2).run(train_hvd, learning_rate=1.0)[-1] > 0.75
    names = sorted(each.name for each in Path(checkpoint_dir).iterdir())
    assert names == [f"checkpoint-{epoch}.weights.h5" for epoch in range(1, 9)]
    assert "val_accuracy" not in capfd.readouterr().out, "only log_to_driver is shown"


def test_pytorch(spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch.nn.functional as F
    from sparkdl import HorovodRunner
    from torch import nn

    log_dir = tmp_path / f"{time.time()}"
    log_dir.mkdir()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 50), nn.Linear(50, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.log_softmax(self.second(F.relu(self.first(x))), dim=1)

    def digits(held: bool) -> Any:
        from sklearn.datasets import load_digits
        from torch.utils.data import TensorDataset

        data, target = load_digits(return_X_y=True)
        part = slice(None, 360) if held else slice(360, None)
        return TensorDataset(torch.tensor(data[part] / 16, dtype=torch.float32), torch.tensor(target[part]))

    def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{log_dir}/checkpoint-{epoch}.pth.tar")

    def train_hvd(learning_rate: float) -> None:
        import horovod.torch as hvd
        from torch.utils.data import DataLoader
        from torch.utils.data.distributed import DistributedSampler

        hvd.init()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(hvd.local_rank())
        dataset = digits(held=False)
        sampler: Any = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
        loader = DataLoader(dataset, batch_size=50, sampler=sampler)
        model = Net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for epoch in range(1, 4):
            for data, target in loader:
                optimizer.zero_grad()
                loss = F.nll_loss(model(data.to(device)), target.to(device))
                loss.backward()
                optimizer.step()
            print(f"Train Epoch: {epoch} Loss: {loss.item():.3f}")
            if hvd.rank() == 0:
                save_checkpoint(model, optimizer, epoch)

    hr = HorovodRunner(np=2, driver_log_verbosity="all")
    hr.run(train_hvd, learning_rate=0.1)
    assert capfd.readouterr().out.count("Train Epoch: 3 Loss: ") == 2
    checkpoint = torch.load(log_dir / "checkpoint-3.pth.tar", weights_only=True)
    model = Net()
    model.load_state_dict(checkpoint["model"])
    torch.optim.SGD(model.parameters()).load_state_dict(checkpoint["optimizer"])
    data, target = digits(held=True).tensors
    assert (model(data).argmax(1) == target).float().mean() > 0.8


def test_petastorm(spark: SparkSession, tmp_path: Path) -> None:
    from petastorm.spark import SparkDatasetConverter, make_spark_converter
    from sklearn.datasets import load_digits
    from sparkdl import HorovodRunner

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, tmp_path.as_uri())
    data, target = load_digits(return_X_y=True)
    rows = [((image / 16).tolist(), int(label)) for image, label in zip(data, target, strict=True)]
    df = spark.createDataFrame(rows, "features array<float>, label bigint").repartition(4)
    df_train, df_val = df.randomSplit([0.8, 0.2], seed=1)
    converter_train, converter_val = make_spark_converter(df_train), make_spark_converter(df_val)
    steps = max(1, len(converter_train) // (32 * 2))

    def train_and_evaluate_hvd(lr: float = 0.1) -> tuple[float, float]:
        import horovod.torch as hvd

        hvd.init()
        model = torch.nn.Linear(64, 10)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        shard = {"cur_shard": hvd.rank(), "shard_count": hvd.size(), "batch_size": 32}
        with converter_train.make_torch_dataloader(**shard) as loader:  # without an end
            batches = iter(loader)
            for _ in range(5 * steps):
                batch = next(batches)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()
                optimizer.step()
        right = seen = 0
        with converter_val.make_torch_dataloader(num_epochs=1, **shard) as loader:
            for batch in loader:
                right += int((model(batch["features"]).argmax(1) == batch["label"]).sum())
                seen += len(batch["label"])
        accuracy = hvd.allreduce(torch.tensor(right), op=hvd.Sum) / hvd.allreduce(torch.tensor(seen), op=hvd.Sum)
        return accuracy.item(), float(hvd.allreduce(torch.tensor(seen), op=hvd.Sum).item())

    try:
        accuracy, seen = HorovodRunner(np=2).run(train_and_evaluate_hvd, lr=0.05)
    finally:
        converter_train.delete()
        converter_val.delete()
    assert seen == df_val.count()
    assert accuracy > 0.8
