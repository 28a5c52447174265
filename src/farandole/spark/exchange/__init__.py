"""Rows of a job's DataFrames on their way from the tasks that read them to the ranks, as Arrow, beside Spark's shuffle.

    driver                          shuffle.py   lays out the query; batches.py: Spark's settings for it
    task that reads a partition     dealer.py    deals its rows at random, a share for each rank, into a file
    the host's keeper               keeper.py    a process of its own that holds such files until all ranks have theirs
    the rank's barrier task         gather.py    brings the rank's shares together in the rank's own file

What Spark shuffles is where the shares are: a row for each, a few dozen bytes.
"""
