"""Names of `horovod.tensorflow.data.compute_service`, whose import gives datasets a method as Horovod's does."""

import tensorflow as tf

from farandole.tensorflow import data_service
from farandole.tensorflow.data_service import compute_worker_fn, send_to_data_service, tf_data_service

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]


class TfDataServiceConfig(data_service.TfDataServiceConfig):
    """The class of `farandole.tensorflow.data_service`.

    A rank that unpickles one imports this module, whose method of datasets the rank's function calls."""


tf.data.Dataset.send_to_data_service = send_to_data_service
