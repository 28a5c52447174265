"""Tables of other systems: Delta, Iceberg, Spark's streams."""
