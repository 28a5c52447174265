"""Exit codes of the commands, as those of a shell."""

USAGE_ERROR, NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 2, 126, 127, 130
