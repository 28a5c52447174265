"""From a rendezvous to a running engine."""
