"""What the timelines of a job's ranks tell once they are written: read, put on one clock, merged, reported."""
