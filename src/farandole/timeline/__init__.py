"""Finished timelines of a job's ranks: read, put on one clock, merged, reported."""
