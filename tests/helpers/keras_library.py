"""Keras as TensorFlow's switch chooses it: `keras` is tf_keras, which is Keras 2, with TF_USE_LEGACY_KERAS=1."""

import importlib
import os
from typing import Any

is_keras_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras: Any = importlib.import_module("tf_keras" if is_keras_2 else "keras")
log: Any = importlib.import_module("tensorflow").math.log if is_keras_2 else keras.ops.log
