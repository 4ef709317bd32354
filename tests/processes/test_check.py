"""`hf-parallel check` on forked ranks: what it finds, what it marks, and how it ends when a rank fails or stands."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.check import links, parity, run, system
from hf_parallel.check import links as ranks
from hf_parallel.check.report import FAILED, NOTE, OK, SLOW, Report, Row, format_ranks
from hf_parallel.cli import main
from hf_parallel.planner.hardware import find_link
from hf_parallel.planner.ledger import Group
from hf_parallel.ranks import devices
from tests import distributed

SPEC = "tp=2,pp=2"


def checked(path, **wanted):
    """The report of one rank, as plain values; rank 0 writes the file."""
    asked = run.Wanted(**{"payload": 1 << 16, "json": path, **wanted})
    report = run.check(asked)
    if dist.get_rank() == 0:
        run.publish(report, asked)
    return report.to_dict()


def test_four_ranks(tmp_path):
    """Every group and operation of the layout, and its numbers in fp32 and bf16, with a file and one verdict."""
    path = tmp_path / "check.json"
    first, *others = distributed.run(checked, 4, str(path), parallel=SPEC, dtypes=("fp32", "bf16"))
    assert first["works"], first
    assert json.loads(path.read_text()) == first
    assert all(other["rows"] == [] for other in others)
    found = {(row["part"], row["what"]): row for row in first["rows"]}
    assert {what for part, what in found if part == "groups"} == {"tp", "pp", "host memory"}
    wanted = {f"{axis} {name}" for axis in ("tp", "pp") for name in links.OPERATIONS}
    assert {what for part, what in found if part == "links"} - {"inside a host"} == wanted
    assert found["groups", "pp"]["values"]["ranks"] == [[0, 2], [1, 3]]
    assert [row["status"] for row in first["rows"] if row["part"] == "parity"] == [OK, OK]
    assert "planned_bytes_per_s" in found["links", "tp p2p"]["values"]


def sabotaged(path, **wanted):
    """One rank trains with other rows than its model's other ranks have, and a sum of two ranks is wrong."""
    own = dist.get_rank()
    original, summed = parity.RATE, links._sum_of_ranks
    parity.RATE = 0.2 if own == 1 else original
    links._sum_of_ranks = lambda group: summed(group) + 1
    return checked(path, **wanted)


def test_wrong_numbers_fail(tmp_path, capfd):
    first, *_ = distributed.run(sabotaged, 2, str(tmp_path / "check.json"), parallel="dp_shard=2")
    status = {row["what"]: row["status"] for row in first["rows"]}
    assert status["dp_shard all_reduce"] == status["dp_shard reduce_scatter"] == FAILED
    assert status["dp_shard all_gather"] == OK
    assert status["dp_shard=2 float32"] == FAILED
    assert not first["works"]
    assert "hf-parallel check: FAILED on 2 ranks: links dp_shard all_reduce" in capfd.readouterr().out


def one_fails(path, how):
    """Rank 1 raises, or stands still, while the others go on to a collective."""

    def stops(*args):
        if dist.get_rank() != 1:
            return rate(*args)
        if how == "stands":
            time.sleep(600)
        raise ZeroDivisionError("no such device")

    rate, devices.measure_product_rate = devices.measure_product_rate, stops
    return checked(path, parallel=SPEC, limit_s=2.0 if how == "stands" else 60.0)


@pytest.mark.parametrize("how", ["raises", "stands"])
def test_a_rank_that_fails_ends_all(how, tmp_path, capfd):
    """Within seconds, with its own traceback, and rank 0 says so in table and file."""
    path, began = tmp_path / "check.json", time.monotonic()
    with pytest.raises(distributed.RankFailure) as failure:
        distributed.run(one_fails, 4, str(path), how)
    assert time.monotonic() - began < 90  # seconds; alone 4
    assert set(failure.value.kinds) == {0, 1, 2, 3}
    text, report = capfd.readouterr(), json.loads(path.read_text())
    assert "in stops" in text.err
    said = "rank 1: matrix product: ZeroDivisionError: no such device" if how == "raises" else "stands in matrix"
    assert said in report["verdict"]
    assert text.out.strip().endswith(report["verdict"])
    assert text.err.count("check: rank") == 1


def test_what_each_number_of_ranks_compares():
    for world in (2, 3, 4, 6, 8, 64):
        specs = parity.list_default_layouts(world)
        configs = [ParallelConfig.parse(spec).resolve(world) for spec in specs]
        assert len(set(configs)) == len(configs)
        for axis in ParallelConfig.mesh_axes:
            assert any(config.sizes[axis.name] > 1 for config in configs), (world, axis)
        parity.make_tiny_config(configs[0])
    assert parity.choose_default_product(8) == "tp=2,pp=2,dp_shard=2"
    assert parity.choose_default_product(3) == "tp=3"
    assert parity.choose_default_product(1) == "dp_shard=-1"


def test_what_is_said_of_other_ranks():
    rank = {"host": "a", "python": "3.11", "torch": "2.13", "device": "H100", "place": "x", "backend": "nccl"}
    other = {**rank, "torch": "2.11"}
    found = {row.what: row for row in system.make_system_rows([rank, rank, other])}
    assert found["torch"].status == FAILED
    assert found["torch"].found == "2.13 on 0-1; 2.11 on 2"
    assert found["devices shared"].status == FAILED
    assert system.is_device_shared([rank, other])
    assert not system.is_device_shared([rank, {**rank, "place": "y"}])
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8"


def test_devices_of_several_kinds_are_told_not_failed():
    new = {"host": "a", "python": "3.11", "device": "H100", "memory": 80 << 30, "place": "", "backend": "nccl"}
    old = {**new, "host": "b", "device": "A100", "memory": 40 << 30}
    found = {row.what: row for row in system.make_system_rows([new, {**new, "memory": new["memory"] - 1}, old, old])}
    assert all(row.status != FAILED for row in found.values())
    assert (found["device"].found, found["device"].status) == ("H100 on 0-1; A100 on 2-3", NOTE)
    assert found["devices"].found.startswith("2 x H100, 80.0 GiB, 2 x A100, 40.0 GiB, 2 hosts")
    kinds = ["H100", "H100", "A100", "A100"]
    row = system.make_product_row([700e12, 690e12, 250e12, 240e12], kinds, None, False)
    assert (row.found, row.status) == ("slowest of each: H100 690 TFLOP/s, A100 240 TFLOP/s", OK)
    assert (
        system.make_product_row([700e12, 300e12, 250e12, 240e12], kinds, None, False).status == SLOW
    )  # beside its twin


def test_slow_links_are_named():
    link = find_link("nvlink4")
    planned = Group("tp", 2, link, link.bandwidth)
    half = links.Tried([0, 1], latency=1e-5, right=True)
    for seconds, crowded, status in ((5e-5, False, OK), (1e-2, False, SLOW), (1e-2, True, OK)):
        rows = [half._replace(seconds=seconds), half._replace(seconds=seconds / 2)]
        row = links._make_link_row("tp", "all_reduce", rows, planned, 1 << 24, crowded)
        assert row.status == status
        assert row.values["bytes_per_s"] == pytest.approx((1 << 24) / seconds)
    assert "slower than half" in Report(2, [Row("links", "tp", "x", status=SLOW)]).verdict
    missing = links._make_link_row(
        "tp", "p2p", [links.Tried([0, 1], missing="gloo does not support send")], planned, 1, False
    )
    assert missing.status == NOTE


def test_ranks_that_share_a_gpu():
    """NCCL refuses two ranks on one device of one host, so each is a host to it."""
    alone, crowded = ranks.make_environments(2, 2), ranks.make_environments(4, 2)
    assert [own["LOCAL_RANK"] for own in alone] == ["0", "1"]
    assert not any("NCCL_HOSTID" in own for own in alone)
    assert [own["LOCAL_RANK"] for own in crowded] == ["0", "1", "0", "1"]
    assert len({own["NCCL_HOSTID"] for own in crowded}) == 4
    assert {own["NCCL_NET"] for own in crowded} == {"Socket"}
    assert ranks.count_ranks_to_start(None, None, 8) == 8
    assert ranks.count_ranks_to_start(None, 6, 8) == 6


def test_a_rank_of_ours_that_dies_ends_the_others(tmp_path):
    began = time.monotonic()
    code = "import os, time; time.sleep(600 if os.environ['RANK'] == '0' else 0); raise SystemExit(3)"
    ranks_ = ranks.make_environments(2, 0)
    saved, ranks.GRACE_S = ranks.GRACE_S, 0.2
    try:
        assert ranks.start_ranks(["-c", code], ranks_) == 3
    finally:
        ranks.GRACE_S = saved
    assert time.monotonic() - began < 90  # seconds; alone one


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells processes that their parent is gone")
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    rank = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"from hf_parallel.check import links; links.start_ranks(['-c', {rank!r}], links.make_environments(1, 0))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 90
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    launcher.kill()
    launcher.wait()
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":  # a zombie where nobody collects it
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parallel", "tp=3", "--nproc", "4"], "start 3 processes"),
        (["--nproc", "0"], "--nproc 2 works"),
        (["--dtype", "fp8"], "--dtype fp32,bf16 works"),
        (["--limit", "0"], "--limit 60 works"),
    ],
)
def test_command_lines_that_cannot_work(words, said, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["check", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    """Two ranks of their own processes, on one GPU or on two."""
    path = tmp_path / "check.json"
    assert main(["check", "--nproc", "2", "--parallel", "tp=2", "--payload", "1", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["works"]
