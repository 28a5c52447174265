"""Trainer of Keras models."""
