"""Trainers, which the ranks of an estimator run: one for each framework."""
