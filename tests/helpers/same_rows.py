"""Fits of the three estimators to the same rows. As a program it fits one estimator without Spark."""

import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

# All estimators get their rows in one way, so one of them tries each form.
FORMS = {"torch": ("pandas", "arrow", "files"), "keras": ("pandas",), "lightning": ("pandas",)}
SETTINGS: Mapping[str, Any] = {
    "num_proc": 2, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 4, "epochs": 2, "random_seed": 7,
    "validation": 0.2, "verbose": 0,
}  # fmt: skip


def rows() -> pd.DataFrame:
    """Return 41 rows, with some duplicates."""
    numbers = np.random.default_rng(3).normal(size=(41, 3)).astype(np.float32)
    numbers[30:] = numbers[5]
    return pd.DataFrame({"x": [[float(each) for each in row] for row in numbers], "y": np.abs(numbers).sum(1).tolist()})


def _torch() -> Any:
    import torch

    from farandole.estimators.torch import TorchEstimator

    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return TorchEstimator(**SETTINGS, model=net, optimizer=optimizer, loss=torch.nn.functional.mse_loss)


def _keras() -> Any:
    import keras

    from farandole.estimators.keras import KerasEstimator

    keras.utils.set_random_seed(5)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    return KerasEstimator(**SETTINGS, model=net, optimizer=keras.optimizers.Adam(0.01), loss="mse")


def _lightning() -> Any:
    import lightning.pytorch as lightning
    import torch

    from farandole.estimators.lightning import LightningEstimator

    # A class in a function is pickled by value; ranks cannot import this file.
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self(batch["x"]).squeeze(1), batch["y"])

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return LightningEstimator(**SETTINGS, model=Net())


_MAKERS: Mapping[str, Callable[[], Any]] = {"torch": _torch, "keras": _keras, "lightning": _lightning}


def make(name: str) -> Any:
    """Return a new estimator, always with the same weights."""
    return _MAKERS[name]()


def result_of(fitted: Any) -> tuple[list[Any], list[dict[str, float]]]:
    """Return the weights and the epochs' losses."""
    model = fitted.getModel()
    weights = (
        model.get_weights() if hasattr(model, "get_weights") else [each.detach().numpy() for each in model.parameters()]
    )
    names = ("loss", "val_loss", "steps")
    return [np.asarray(each) for each in weights], [{name: each[name] for name in names} for each in fitted.history]


def fits_without_spark(name: str, files: str) -> dict[str, Any]:
    """Fit an estimator to each form of the rows; `files` is a folder with one form, Parquet files."""
    frame = rows()
    given = {"pandas": frame, "arrow": pa.table({name: pa.array(frame[name]) for name in frame}), "files": files}
    return {form: result_of(make(name).fit(given[form])) for form in FORMS[name]}


if __name__ == "__main__":
    Path(sys.argv[3]).write_bytes(pickle.dumps(fits_without_spark(*sys.argv[1:3])))
