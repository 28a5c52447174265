"""Spark jobs of ranks: barrier stages, sessions, tasks and the ranks' processes."""
