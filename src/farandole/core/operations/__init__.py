"""Operations, from a user's call to a request of the engine."""
