"""Object stores and web servers: a client each, and requests for ranges."""
