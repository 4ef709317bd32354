"""A rollout server in a process of its own, for as long as a test needs it."""

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator

from tests import rollouts


@contextlib.contextmanager
def running(folder: str, by_row: bool = False, reference: bool = False) -> Iterator[int]:
    """Serve a model's folder; yields the port.

    Args:
        by_row: draws are those of `rollouts.draw_by_row`.
        reference: it gives log-probabilities instead.
    """
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(folder, by_row, reference, tell), daemon=True)
    process.start()
    try:
        assert told.poll(60), "the server has not started"
        yield told.recv()
    finally:
        process.kill()
        process.join()


def _serve(folder: str, by_row: bool, reference: bool, tell) -> None:
    import torch

    from hf_parallel.rollouts.server import load, load_reference, serve

    torch.set_num_threads(1)
    if by_row:
        rollouts.draw_by_row()
    server = serve((load_reference if reference else load)(folder), "127.0.0.1", 0)
    tell.send(server.server_port)
    server.serve_forever()


def free_port() -> int:
    """For the group of the weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
