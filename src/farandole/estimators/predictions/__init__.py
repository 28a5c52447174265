"""Predictions of fitted models for batches of rows, for each framework."""
