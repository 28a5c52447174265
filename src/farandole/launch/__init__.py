"""Launchers of ranks, on this machine and on others: `farandole run` and `farandole.run`."""
