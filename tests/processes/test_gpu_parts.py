"""Parts of `make gpu` on a machine without a GPU."""

import json

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import setting
from hf_parallel.check.report import NOTE, OK, SKIPPED
from tests.distributed import run
from tests.unit.test_gpu_parts import forked

#: Of each part: lines that must be in its table, and their marks.
LINES = {
    "links": {"tp all_reduce, 2 ranks": OK, "pp p2p, 4 ranks": OK},
    "layouts": {"tp2": NOTE, "dp_shard2": NOTE},
    "checkpoints": {"tp=2 -> dp_shard=2": OK},
    "syncs": {"plain Trainer": NOTE, "tp=2": NOTE},
    "memory": {"tiny tp=2,dp_shard=2": OK, "  parameters": NOTE},
    "speed": {"tiny plain Trainer, 1 x 33": NOTE, "overlap dp_shard=2": SKIPPED},
    "context": {"ring, 257": NOTE, "allgather, 257": NOTE, "torch's context_parallel": SKIPPED},
}


#: Of each part: what its section of the page has.
SECTIONS = {
    "syncs": ("## Waits of the host", "| tp=2 |"),
    "layouts": ("## Waits of the host", "| dp_shard2 |"),
    "memory": ("## Memory", "| tiny tp=2,dp_shard=2 |", "GiB"),
    "speed": ("## Speed", "tokens/s", "| tiny plain Trainer, 1 x 33 |"),
    "context": ("## Long sequences", "| ring, 257 |"),
}


@pytest.mark.parametrize("part", LINES)
def test_part_without_a_gpu(part, tmp_path, monkeypatch, capsys):
    """It says so, runs, writes its table and the page, ends with 0 and names what did not run."""
    monkeypatch.setattr(setting.Setting, "here", lambda *given: setting.Setting(0, True, run=forked))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(str(command.ROOT))
    assert command.main([part, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert [words for words in (*SECTIONS.get(part, ()), "## Parts", f"| {part} | works") if words not in page] == []
    assert "## Failed" not in page
    found = json.loads((tmp_path / f"{part}.json").read_text())
    marks = {row["what"]: row["status"] for row in found["rows"]}
    assert marks.items() >= LINES[part].items()
    assert found["rows"][0]["found"].startswith("no GPU here")
    assert found["not_run"]
    assert f"gpu {part}: works on 1 CPU part" in capsys.readouterr().out


def test_parity_compares_every_axis_and_product():
    from benchmarks.gpu import parity

    assert {"tp=2", "pp=2", "dp_shard=2"} <= set(parity.layouts(2))
    assert {"tp=2,pp=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2"} <= set(parity.layouts(4))
    rows = run(parity.rank, 2, ["tp=2"], ["bf16"])[0]
    assert [row["status"] for row in rows if row["part"] == "parity"] == [OK]
