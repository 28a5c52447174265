"""Tools for the finished timelines of a job's ranks: reader, clock comparison, merged trace, report."""
