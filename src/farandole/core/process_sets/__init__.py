"""Process sets: some of a job's ranks, which work as a job of their own."""
