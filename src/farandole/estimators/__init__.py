"""Estimators and their fitted models: parameters, stores, files, and trainers for each framework."""
