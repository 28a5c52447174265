"""Autotune: the knobs, which can change while a job runs, and the search for good values of them."""
