"""Calls of estimators for mypy, which would report an unused `type: ignore` if it took a wrong one."""

from farandole.estimators.torch import TorchEstimator


def right(estimator: TorchEstimator) -> tuple[list[str], int | None, TorchEstimator]:
    """Use the types that the declarations of parameters give to arguments, setters and getters."""
    made = TorchEstimator(epochs=3, num_proc=None, feature_cols=("x",), validation=0.1).copy({estimator.epochs: 2})
    return made.getFeatureCols(), made.getNumProc(), made.setEpochs(2).setRunId(None)


def wrong(estimator: TorchEstimator) -> int:
    """Use wrong types."""
    TorchEstimator(epochs="3")  # type: ignore[arg-type]
    TorchEstimator(epoch=3)  # type: ignore[call-arg]
    estimator.setEpochs(None)  # type: ignore[arg-type]
    return estimator.getNumProc()  # type: ignore[return-value]
