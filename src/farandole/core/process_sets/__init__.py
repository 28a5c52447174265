"""Process sets: some ranks of a job with an engine of their own."""
