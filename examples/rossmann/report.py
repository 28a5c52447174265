"""Predictions of sales: their error, the submission file, and pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from rossmann.features import LABEL

if TYPE_CHECKING:
    from farandole.spark.keras import KerasModel

MOST_STORES = 4  # in the picture


def rmspe(sales: ArrayLike, predicted: ArrayLike) -> float:
    """Return the competition's error: the root of the mean squared relative error, over days with sales."""
    real, guess = np.asarray(sales, float), np.asarray(predicted, float)
    sold = real > 0
    return float(np.sqrt(np.mean(np.square(1 - guess[sold] / real[sold]))))


def predict(fitted: "KerasModel", rows: DataFrame) -> pd.DataFrame:
    """Return the validation's and the test's rows with the column Predicted; runs one job.

    Predictions for closed stores are 0."""
    wanted = fitted.transform(rows.where("Id IS NOT NULL OR Validation"))
    sales = F.when(F.col("Open") == 0, 0.0).otherwise(F.exp(f"{LABEL}__output"))
    kept = ["Id", "Store", "Date", "DayOfWeek", "Sales", "Validation"]
    return wanted.select(*kept, sales.alias("Predicted")).toPandas()


def baselines(rows: DataFrame, held_out: pd.DataFrame) -> dict[str, float]:
    """Return the errors of two means of the training rows: of all, and of each store and day of the week."""
    training = rows.where("NOT Validation")
    means = training.groupBy("Store", "DayOfWeek").agg(F.mean("Sales").alias("mean"), F.count("*").alias("days"))
    table = means.toPandas()
    overall = np.average(table["mean"], weights=table["days"])
    both = held_out.merge(table, on=["Store", "DayOfWeek"], how="left")["mean"].fillna(overall)
    return {
        "mean of all": rmspe(held_out["Sales"], np.full(len(held_out), overall)),
        "mean of store and weekday": rmspe(held_out["Sales"], both),
    }


def write_submission(predicted: pd.DataFrame, path: Path) -> None:
    """Write Id and Sales of the test's rows, ordered by Id."""
    test = predicted[predicted["Id"].notna()].sort_values("Id")
    pd.DataFrame({"Id": test["Id"].astype(int), "Sales": test["Predicted"].round(2)}).to_csv(path, index=False)


def plot_predictions(held_out: pd.DataFrame, path: Path) -> None:
    """Draw sales and predictions of some stores over the validation's days, and of all stores against each other."""
    stores = sorted(held_out["Store"].unique())[:MOST_STORES]
    figure = Figure(figsize=(11, 2.2 * len(stores)), layout="constrained")
    grid = figure.add_gridspec(len(stores), 2, width_ratios=[2, 1])
    for place, store in enumerate(stores):
        days = held_out[held_out["Store"] == store].sort_values("Date")
        axes = figure.add_subplot(grid[place, 0])
        axes.plot(days["Date"], days["Sales"], marker="o", markersize=3, label="sales")
        axes.plot(days["Date"], days["Predicted"], marker="o", markersize=3, label="predicted")
        axes.set_title(f"store {store}, RMSPE {rmspe(days['Sales'], days['Predicted']):.3f}", fontsize="medium")
        axes.tick_params(axis="x", labelrotation=20)
        if place == 0:
            axes.legend()
    axes = figure.add_subplot(grid[:, 1])
    axes.scatter(held_out["Sales"], held_out["Predicted"], s=4)
    most = float(held_out[["Sales", "Predicted"]].to_numpy(float).max())
    axes.plot([0, most], [0, most], color="gray", linewidth=1)
    axes.set_xlabel("sales")
    axes.set_ylabel("predicted")
    axes.set_title(f"all stores, RMSPE {rmspe(held_out['Sales'], held_out['Predicted']):.3f}", fontsize="medium")
    figure.savefig(path)
