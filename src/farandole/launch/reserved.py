"""Reserved port: a free port that all ranks know before one of them listens on it."""

import socket

from farandole.closing import Closing


class ReservedPort(Closing):
    """A port of this machine that a rank can listen on, and that no other process gets while this is open.

    A socket here is bound to it and does not listen. Linux gives such a port to no socket that requests any free
    port. A socket that requests this port gets it if both have SO_REUSEADDR, as torch's TCPStore and most servers have
    (inet_csk_bind_conflict in net/ipv4/inet_connection_sock.c)."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if dual:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", 0))
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
