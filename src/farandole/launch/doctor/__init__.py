"""The command `farandole doctor`: facts about machines and the network between them, and the problems found."""
