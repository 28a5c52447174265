"""Starting ranks on this machine: `farandole run` and `farandole.run`."""
