"""A rollout server in a process of its own, for as long as a test needs it."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

from tests import rollouts
from tests.ports import held_port


@dataclass(frozen=True)
class Server:
    """Where it answers, and where the group of the weights may meet."""

    port: int
    group_port: int

    @property
    def url(self) -> str:
        """Of its answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def flags(self) -> str:
        """What TRL's scripts are told of it."""
        where = f"--vllm_server_base_url {self.url} --vllm_group_port {self.group_port}"
        return f"--use_vllm true --vllm_mode server {where}"


@contextlib.contextmanager
def running(folder: str, by_row: bool = False, reference: bool = False) -> Iterator[Server]:
    """Serve a model's folder.

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
        with held_port() as group_port:
            yield Server(told.recv(), group_port)
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
