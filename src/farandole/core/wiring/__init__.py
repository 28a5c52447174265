"""Wiring: the way from a rendezvous to a running engine."""
