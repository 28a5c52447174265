"""Trainer of TensorFlow's model functions, which each rank of a `HorovodEstimator` runs."""
