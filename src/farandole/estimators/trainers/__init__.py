"""Trainers: the code that the ranks of an estimator run, for each framework."""
