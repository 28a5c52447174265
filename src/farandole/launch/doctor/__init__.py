"""The command `farandole doctor`: facts of machines and of the network between them, and problems among these."""
