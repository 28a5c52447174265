"""Datasets that processes of their own prepare: TensorFlow's data service, started as a job and found by training jobs.

farandole run -np 2 python -m farandole.tensorflow.data_service.compute_worker service.json

config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
dataset = send_to_data_service(dataset.batch(128), config, hvd.rank())
...
config.compute_client().shutdown()
"""

from farandole.tensorflow.data_service.config import TfDataServiceConfig
from farandole.tensorflow.data_service.registry import ComputeClient, ComputeService
from farandole.tensorflow.data_service.servers import compute_worker_fn, send_to_data_service, tf_data_service

__all__ = [
    "ComputeClient",
    "ComputeService",
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "tf_data_service",
]
