"""Petastorm's data sets: Parquet with a Unischema, whose codecs say how arrays and images are stored."""
