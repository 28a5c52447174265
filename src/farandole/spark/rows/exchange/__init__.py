"""Transfer of a job's DataFrame rows, as Arrow, from the tasks that read them to the ranks, outside Spark's shuffle.

    driver                          shuffle.py   lays out the query; batches.py: Spark's settings for it
    task that reads a partition     dealer.py    deals its rows at random, a share for each rank, into a file
    the host's keeper               keeper.py    a process of its own that holds such files until all ranks have theirs
    the rank's barrier task         gather.py    copies the rank's shares to the rank's own file

Spark shuffles only the places of the shares: a row of a few dozen bytes for each.
"""
