"""What a terminal shows while something takes longer than a few seconds, and a log file does not."""

import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from hf_parallel import cli
from hf_parallel.ask import waiting as waiting_module
from hf_parallel.ask.waiting import waiting
from tests.commands import ROOT


class Terminal(io.StringIO):
    """What a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(waiting_module, "sys", SimpleNamespace(stderr=stream))  # pytest exchanges sys's own
    monkeypatch.setattr(waiting_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(waiting_module, "_EACH_S", 0.02)
    for name in ("CI", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return stream


def test_a_line_that_says_what_goes_on_and_is_taken_away(terminal):
    with waiting("reading") as say:
        time.sleep(0.2)
        say("ranking")
        time.sleep(0.1)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[1] == "hf_parallel: reading … 0 s"
    assert shown[-2] == "hf_parallel: ranking … 0 s"
    assert shown[-1] == ""
    assert "hf_parallel/waiting" not in [thread.name for thread in threading.enumerate()]


def test_nothing_that_is_quick_is_said(terminal):
    with waiting("reading"):
        pass
    assert terminal.getvalue() == ""


def test_it_ends_with_an_error(terminal):
    def fails():
        with waiting("reading"):
            time.sleep(0.1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_an_empty_line_for_what_is_printed_inside(terminal):
    with waiting("reading") as say:
        time.sleep(0.1)
        say("")
        time.sleep(0.1)
        assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("changes", [{"RANK": "1"}, {"CI": "true"}, None], ids=["rank 1", "CI", "file"])
def test_who_sees_nothing(terminal, monkeypatch, changes):
    for name, value in (changes or {}).items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO() if changes is None else terminal
    monkeypatch.setattr(waiting_module, "sys", SimpleNamespace(stderr=stream))
    with waiting("reading"):
        time.sleep(0.15)
    assert stream.getvalue() == ""


def test_what_commands_say(terminal, monkeypatch, tmp_path):
    """`report` on a terminal; its path comes after the line."""
    monkeypatch.setattr("hf_parallel.monitor.report.write", lambda *_: time.sleep(0.2) or "page.html")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert re.search("hf_parallel: writing the page … 0 s.*\r\x1b\\[Kpage.html\n$", terminal.getvalue(), re.DOTALL)


def test_what_plan_says(terminal, capsys):
    words = ["plan", "hf_parallel/recipes/models/llama-3.2-1b.json", "--gpus", "8", "--gpu", "h100-80gb"]
    assert cli.main([str(ROOT / word) if word.endswith("json") else word for word in words]) == 0
    assert "hf_parallel: ranking layouts …" in terminal.getvalue()
    assert "dp_shard=" in capsys.readouterr().out
