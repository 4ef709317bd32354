"""Errors of the thread that looks for hangs: it says so once, and goes on looking."""

import time

import pytest
import torch.distributed as dist

from hf_parallel.monitor import watchdog


@pytest.fixture
def watching(tmp_path, monkeypatch):
    """`watching(collectives)`: the watchdog of a world of one rank, whose looks are frequent."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.2)
    made = []

    def start(collectives=lambda: {"pending": [], "groups": {}}):
        settings = watchdog.Settings(limit_s=0.4, ends=False, folder=str(tmp_path))
        made.append(watchdog.Watchdog(dist.HashStore(), 0, 1, settings, collectives))
        return made[0]

    yield start
    for one in made:
        one.close()


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_look_that_fails_is_told_once_and_repeated(watching, monkeypatch, capfd):
    looks, look = [], watchdog.Watchdog._look

    def failing(self):
        looks.append(1)
        if len(looks) <= 3:
            raise KeyError("place")
        look(self)

    monkeypatch.setattr(watchdog.Watchdog, "_look", failing)
    own = watching()
    until(own.told.is_set)  # nothing ends in 0.4 s, and it is still there to say so
    said = capfd.readouterr().err
    assert said.count("rank 0 could not look for hangs, and tries again: KeyError('place')") == 1
    assert "nothing has ended for" in said


def test_facts_that_cannot_be_had_hide_no_place(watching, capfd, tmp_path):
    def broken():
        raise ZeroDivisionError("no record")

    own = watching(broken)
    until(own.told.is_set)
    assert "nothing has ended for" in capfd.readouterr().err
    assert "no record" in (tmp_path / watchdog.FOLDER / "rank_0.json").read_text()
    assert own._watcher.is_alive()


def test_a_store_that_is_gone_ends_the_thread_alone(watching, monkeypatch):
    own = watching()

    def gone(*args):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(watchdog.Watchdog, "_look", gone)
    until(lambda: not own._watcher.is_alive())  # this thread waits for nobody, so nothing is said or ended
