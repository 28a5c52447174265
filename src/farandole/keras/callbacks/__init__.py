"""Callbacks for `fit` with Horovod's names: broadcast, averaged metrics, learning rates, checkpoints."""

from farandole.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from farandole.keras.callbacks.checkpoint import BestModelCheckpoint
from farandole.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from farandole.keras.callbacks.metrics import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
