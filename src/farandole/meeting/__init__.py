"""Meeting of ranks: handshake, connections, rounds of messages, and the rendezvous of each launcher."""
