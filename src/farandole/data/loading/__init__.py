"""Passes over rows: plans, orders, loaders, and the threads and processes that read."""
