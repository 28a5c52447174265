"""Trainer of Lightning modules."""
