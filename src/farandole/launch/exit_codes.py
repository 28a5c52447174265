"""Exit codes of the commands; from 126 on, those of a shell."""

OUTPUT_LOST, USAGE_ERROR, NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 1, 2, 126, 127, 130
