"""Trainer of model functions of TensorFlow: the part of each rank of a `HorovodEstimator`."""
