"""Rows of DataFrames: in calls, from Spark's tasks to ranks, and Petastorm's converter."""
