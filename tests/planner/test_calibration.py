"""`check --calibrate`: its file, and how plans, `auto` and finished runs use it."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.check import run as checking
from hf_parallel.planner import calibration
from hf_parallel.planner.calibration import (
    VARIABLE,
    Calibration,
    Measured,
    calibrate_cluster_here,
    find_measured_step,
    name_device,
    read_calibration,
    remember_step,
)
from hf_parallel.planner.detect import detect
from hf_parallel.planner.layout import Layout, make_job
from hf_parallel.planner.predict import compute_gemm_seconds, predict_step
from hf_parallel.planner.shape import shape_of
from tests import distributed
from tests.rows import Rows
from tests.training import activate, trainer_of

NUMBERS = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn_hidden": 704, "vocab": 512, "gated_mlp": 1}
RATE, DEPTH = 8e10, 40.0
BATCH = {"rows": 2, "calls": 1, "seq": 64, "precision": "fp32"}


def measured(slower=1.0, all_reduce=()):
    """A machine whose products are exactly as the formula has them."""
    products = [
        (dtype, 256, 512, k, slower * 2 * 256 * 512 * (k + DEPTH) / rate)
        for dtype, rate in (("fp32", RATE), ("bf16", 2 * RATE))
        for k in (64, 256, 1024)
    ]
    attention = (4, 4, 64, 128, slower * 1e-3, slower * 4e-3)
    return Measured(products, 1.25, attention, 1e11, 4.0, 5e10, all_reduce, 0.0, (NUMBERS, 2, 64, slower * 0.03))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A calibration of this machine with one and with four processes, where plans look for it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.json"))
    device = name_device(detect(1, calibrated=False))
    slow = measured(3.0, [(1024, 60e-6), (1 << 22, 60e-6 + 1.5 * (1 << 22) / 1e9)])
    made = Calibration(device, "2026-11-27", {"torch": torch.__version__}, {1: measured(), 4: slow})
    made.write(str(tmp_path / "calibration.json"))
    return made


def test_the_file(file):
    """What was written is read, with numbers as keys and the probe as it was."""
    found = read_calibration()
    assert sorted(found.processes) == [1, 4]
    assert found.processes[1].bandwidth == 1e11
    assert json.loads(json.dumps(dataclasses.asdict(found))) == json.loads(json.dumps(dataclasses.asdict(file)))


def test_no_file_and_a_damaged_one(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    assert read_calibration() is None
    for text in ("{", '{"version": 0}', "[]"):
        path.write_text(text)
        with pytest.raises(SpecError, match="hf-parallel check --calibrate") as refused:
            detect(1)
        assert str(path) in str(refused.value)


@pytest.mark.parametrize(("processes", "slower"), [(1, 1.0), (4, 3.0)])
def test_measured_times_are_predicted(file, processes, slower):
    """Products, the probe and all-reduces, each as measured with as many processes."""
    cluster = detect(processes)
    assert "calibrated on 2026-11-27" in cluster.gpu.source
    for k in (64, 256, 1024):
        seconds = slower * 2 * 256 * 512 * (k + DEPTH) / RATE
        assert compute_gemm_seconds(cluster.gpu, "fp32", 256, 512, k) == pytest.approx(seconds, rel=1e-6)
    job = make_job(Layout(), 64, 2, 2, precision="fp32", optimizer="adamw", engine="hf_parallel")
    alone = dataclasses.replace(cluster, gpus=1, per_node=1)
    found = predict_step(shape_of(NUMBERS), alone, Layout(), job).step_time_s
    assert found == pytest.approx(slower * 0.03, rel=1e-3)
    if processes == 4:
        assert cluster.inside.bandwidth == pytest.approx(1e9, rel=1e-6)
        assert cluster.inside.latency == pytest.approx(60e-6 / 6)


def test_a_probe_faster_than_its_products(file):
    """Products are taken for as fast as the step shows them to be."""
    quick = dataclasses.replace(measured(), probe=(NUMBERS, 2, 64, 0.012))
    fast = dataclasses.replace(file, processes={1: dataclasses.replace(quick, kernel_us=0.1)})
    cluster = calibrate_cluster_here(detect(1, calibrated=False), fast)
    job = make_job(Layout(), 64, 2, 2, precision="fp32", optimizer="adamw", engine="hf_parallel")
    assert predict_step(shape_of(NUMBERS), cluster, Layout(), job).step_time_s == pytest.approx(0.012, rel=0.02)


def test_another_device_is_left_alone(file):
    """As is what `check` compares with."""
    plain = detect(1, calibrated=False)
    assert "calibrated" not in plain.gpu.source
    other = dataclasses.replace(file, device="h100-80gb")
    assert calibrate_cluster_here(plain, other) is plain
    assert calibrate_cluster_here(plain, None) is plain


def test_finished_runs(file):
    """The step of a model, layout and batch; the later of two; not that of another batch, layout or model."""
    shape, config = shape_of(NUMBERS), ParallelConfig.parse("tp=2,monitor=full").resolve(2)
    for seconds in (0.5, 0.25):
        remember_step(file, shape, config, BATCH, seconds, "2026-11-27")
    assert len(file.steps) == 1
    assert find_measured_step(file, shape, ParallelConfig.parse("tp=2").resolve(2), BATCH) == 0.25
    assert find_measured_step(file, shape, ParallelConfig.parse("dp_shard=2").resolve(2), BATCH) is None
    assert find_measured_step(file, shape, config, {**BATCH, "rows": 4}) is None
    assert find_measured_step(file, shape_of({**NUMBERS, "layers": 3}), config, BATCH) is None


def test_plan_shows_both(file, capsys, tmp_path):
    """One line says what the rates are; a step that ran stands beside its prediction."""
    (tmp_path / "numbers.json").write_text(json.dumps(NUMBERS))
    asked = ["plan", str(tmp_path / "numbers.json"), "--gpu", "measured", "--gpus", "4", "--seq", "64"]
    asked += ["--global-batch", "8", "--precision", "fp32", "--headroom", "0"]
    assert cli.main([*asked, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    batch = {"rows": first["per_device_train_batch_size"], "calls": first["gradient_accumulation_steps"]}
    remember_step(
        file, shape_of(NUMBERS), ParallelConfig.parse(first["spec"]).resolve(4), {**BATCH, **batch}, 0.125, ""
    )
    file.write(calibration.choose_calibration_path())
    assert cli.main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["measured_here_s"] == 0.125
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    assert "measured here" in said
    assert "0.125" in said
    assert "rates of this machine, calibrated on 2026-11-27" in said


def test_measured_without_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    (tmp_path / "numbers.json").write_text(json.dumps(NUMBERS))
    assert cli.main(["plan", str(tmp_path / "numbers.json"), "--gpu", "measured"]) == 2
    assert "hf-parallel check --calibrate" in capsys.readouterr().err


def calibrating(path):
    report = checking.check(checking.Wanted(calibrate=path))
    return [row.what for row in report.rows]


@pytest.mark.clock
def test_measuring(tmp_path, monkeypatch):
    """Two processes measure one and two at work; plans of two use the latter."""
    path = str(tmp_path / "calibration.json")
    first, second = distributed.run(calibrating, 2, path)
    assert first == ["1 process", "2 processes", "file"]
    assert second == []
    monkeypatch.setenv(VARIABLE, path)
    found = read_calibration()
    assert found.processes[1].all_reduce == []
    assert len(found.processes[2].all_reduce) == 2
    assert "calibrated" in detect(2).gpu.source


def trained(initial, out):
    ranks = activate("tp=2")
    model = AutoModelForCausalLM.from_pretrained(initial)
    rows = Rows(24, seed=11)
    rows.tokens %= model.config.vocab_size
    trainer, _ = trainer_of(model, out, ranks, {"max_steps": 3}, train_dataset=rows)
    trainer.train()


def test_a_finished_run_is_kept(file, runs, tmp_path):
    """With the median of its logged steps, for the model, layout and batch that ran."""
    distributed.run(trained, 2, runs.initial("llama"), str(tmp_path / "out"), init=False)
    (step,) = read_calibration().steps
    assert step["batch"] == {"rows": 8, "calls": 1, "seq": 16, "precision": "fp32"}
    assert ParallelConfig.parse(step["spec"]).tp_size == step["world"] == 2
    assert 0 < step["step_time_s"] < 60
    shape = shape_of(AutoConfig.from_pretrained(runs.initial("llama")))
    assert find_measured_step(read_calibration(), shape, ParallelConfig.parse("tp=2").resolve(2), step["batch"]) > 0
