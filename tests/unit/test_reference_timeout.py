"""A server of a reference that takes a question and says nothing ends the run with a line: where, and what to do."""

import socket
import threading
import time

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.rollouts.reference import ask_server
from tests.refusals import find_line, pattern_of_refusal


@pytest.mark.parametrize("says", [b"", b"HTTP/1.0 200 OK\r\n\r\n{"], ids=["nothing", "half"])
def test_a_server_that_hangs(says):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, began, taken = f"http://127.0.0.1:{server.getsockname()[1]}", time.monotonic(), []

        def half():
            taken.append(server.accept()[0])
            taken[0].sendall(says)

        threading.Thread(target=half, daemon=True).start()
        with pytest.raises(RuntimeError) as caught:
            ask_server(address, "log_probs", 0.3, {"input_ids": [[1]]})
        assert time.monotonic() - began < 60  # a fraction of a second on a free machine; without the limit for ever
    message = str(caught.value)
    assert find_line(message, f"{address}/log_probs", "0.3 s")
    assert "reference_timeout_s=2" in message
    assert "\n" not in message


def test_seconds_are_a_number():
    with pytest.raises(
        SpecError, match=pattern_of_refusal("reference_timeout_s=0", works="reference_timeout_s=600 works")
    ):
        ParallelConfig.parse("tp=2,reference_timeout_s=0").resolve(2)
    ParallelConfig.parse("tp=2,reference_timeout_s=600").resolve(2)
