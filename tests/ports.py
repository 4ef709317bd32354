"""Ports of this machine at which a test's processes are going to listen: nobody else is given them before."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that the kernel gives to no one who asks for any; servers that reuse addresses may listen at it.

    A port that was looked up and let go may be another process's a moment later: each group of gloo listens at one.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
