"""What all frameworks share: the context, the operations, and what a distributed optimizer decides."""
