"""Monitors of a rank's engines: timeline, stall inspector, metrics."""
