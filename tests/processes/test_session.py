"""What a layout remembers lies in one object, and is gone when the layout ends."""

import pytest

from hf_parallel.ask.session import end_session, of_process, of_session
from tests.distributed import run


class Counted:
    """Something that a module remembers."""

    def __init__(self) -> None:
        self.number = 0


class Other(Counted):
    """A class of its own has an object of its own."""


@pytest.fixture(autouse=True)
def clean():
    end_session()
    yield
    end_session()


def test_an_object_stays_until_the_session_ends():
    of_session(Counted).number = 3
    assert (of_session(Counted).number, of_session(Other).number) == (3, 0)
    of_process(Other).number = 4
    end_session()
    assert of_session(Counted).number == 0
    assert (of_session(Other).number, of_process(Other).number) == (0, 4)


def remembered() -> list[tuple[bool, int]]:
    """Whether a layout is active and how many of its patches are known: before, under and after each of two."""
    from hf_parallel.hooks import activation, runtime

    found = []
    for spec in ("tp=2", "dp_shard=2"):
        for step in (lambda: None, lambda spec=spec: activation.activate(spec), activation.deactivate):
            step()
            found.append((runtime.current() is not None, len(of_session(activation._InPlace).of_layout)))
    return found


def test_a_second_layout_starts_clean():
    for found in run(remembered, 2, init=False, env={"ACCELERATE_USE_CPU": "true"}):
        assert [active for active, _ in found] == [False, True, False] * 2
        assert [patches > 0 for _, patches in found] == [False, True, False] * 2
