"""Trainer of PyTorch models."""
