"""Core that all frameworks share: context, operations, and the decisions of a distributed optimizer."""
