"""What the ranks of an estimator run, one module per framework."""
