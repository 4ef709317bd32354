"""GPUs of several kinds under one launcher, on simulated devices: `auto`, their order, `plan --detect`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, TrainingArguments

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.monitor.session import read_records
from hf_parallel.planner import detect as detecting
from hf_parallel.planner.detect import CPU, Device, detect
from hf_parallel.planner.groups import group_devices, read_machines, write_machines
from hf_parallel.planner.hardware import make_cluster
from hf_parallel.ranks import devices as rates
from tests.distributed import RankFailure, run, run_alone
from tests.planner.test_auto import trained
from tests.planner.test_mixed_clusters import EIGHT_B
from tests.refusals import pattern_of_refusal
from tests.rows import VOCABULARY

H100, A100 = ("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA A100-SXM4-40GB", 39.4)
V100 = ("Tesla V100-SXM2-32GB", 31.7)
ROWS, CALLS, SEQ = 4, 2, 2048


def on_hosts(*kinds) -> list[Device]:
    """Two devices of each kind, on a host of their own."""
    return [Device(f"host{at}", *kind) for at, kind in enumerate(kinds) for _ in range(2)]


# ---- auto -----------------------------------------------------------------------------------------------------------


def chosen_on(devices: list[Device], shown: bool = True) -> tuple[str, list[str], tuple[str, ...]]:
    """The layout that `auto` chooses for Llama-3.1-8B on these devices, what it says, and its reasons."""
    from hf_parallel.hooks import auto, report, runtime

    said, specs = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detecting, "read_device_here", lambda: devices[int(os.environ["RANK"])])
        patch.setattr(report, "say", said.append)
        patch.setattr(runtime, "current", lambda: None)
        auto.wait("the test", lambda config, source: specs.append(config.to_spec()))
        if shown:
            batch = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": CALLS}
            auto.remember_arguments(TrainingArguments("out", use_cpu=True, report_to=[], **batch))
        config = LlamaConfig(**EIGHT_B, architectures=["LlamaForCausalLM"], dtype="bfloat16")
        reasons = []
        own = auto._find_best
        patch.setattr(auto, "_find_best", lambda *given: reasons.append(own(*given)) or reasons[0])
        auto.choose_layout_here(auto.Shown(config))
    return specs[0], said, reasons[0].reasons if reasons else ()


def plan_by_command(*argv: str) -> dict:
    """The plan as the command prints it, where layers are counted by formula as `auto` must."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["plan", *argv, "--json"]) == 0
    return json.loads(out.getvalue())


def test_auto_agrees_with_plan(tmp_path):
    """To the digit: the layout, its step and its memory; nodes were started in the order that `plan` finds best."""
    devices = on_hosts(A100, H100)
    found = run(chosen_on, 4, devices)
    assert len({spec for spec, _, _ in found}) == 1
    spec, said, _ = found[0]
    config = ParallelConfig.parse(spec).resolve(4)
    assert config.shares_batches or config.split_layers or "@" in spec
    LlamaConfig(**EIGHT_B, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    path = str(tmp_path / "mixed.yaml")
    write_machines(path, group_devices(detect(4, 4), devices))
    where = ["--rows", str(ROWS), "--global-batch", str(ROWS * CALLS * config.data_parallel_size), "--seq", str(SEQ)]
    plan = run(plan_by_command, 1, str(tmp_path), "--cluster", path, *where)[0]
    layout = next(one for one in plan["layouts"] if one["spec"] == spec)
    of_all = [one for one in plan["layouts"] if one["groups"] == ["a100-40gb", "h100-80gb"]]
    assert of_all[0] == layout
    needed = [
        f"{layout['needed_gib'][name]:.3g} of {gib} GiB on {name}"
        for name, gib in zip(of_all[0]["groups"], ("39.4", "79.2"), strict=True)
    ]
    assert f"{layout['step_time_s']:.3g} s per step of {where[3]} rows, {', '.join(needed)}" in said[0]


def test_auto_says_who_should_be_left_out():
    """V100s behind a slow network make H100s wait; the line names what to start."""
    spec, said, _ = run(chosen_on, 4, on_hosts(H100, V100))[0]
    assert ParallelConfig.parse(spec).resolve(4).world_size == 4
    assert re.match(r"leave v100-32gb out: 0\.\d\d x the time per sequence, ", said[1])
    assert "To start it" in said[2]
    assert "--num_processes 2 --parallel" in said[2]


def test_a_loop_has_even_shares():
    spec, _, reasons = run(chosen_on, 4, on_hosts(H100, A100), shown=False)[0]
    assert "batch_shares" not in spec
    assert any(
        line.startswith("no layout has batch_shares: the script has shown no TrainingArguments") for line in reasons
    )


def test_kinds_in_turns_are_planned_for_the_slowest():
    devices = [Device(f"host{at}", *kind) for at, kind in enumerate((H100, A100, H100, A100))]
    spec, said, _ = run(chosen_on, 4, devices)[0]
    assert "batch_shares" not in spec
    assert "4 x a100-40gb" in said[0]
    assert "auto plans for the slowest GPU" in said[1]
    assert "nodes of a kind one after another works" in said[1]


def trained_on(devices: list[Device], folder: str, out: str) -> tuple:
    """A Trainer's run under `auto`, as in tests/planner/test_auto.py, on these devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detecting, "read_device_here", lambda: devices[int(os.environ["RANK"])])
        return trained(folder, out, "from_pretrained")


def test_what_auto_chooses_trains(runs, tmp_path):
    devices = [Device("one", *kind) for kind in (H100, A100)]
    results = run(trained_on, 2, devices, runs.initial("llama", vocab_size=VOCABULARY), str(tmp_path))
    assert results[0] == results[1]
    assert results[0][2:4] == (True, 2)
    (began, *_) = [line for line in read_records(str(tmp_path)) if line["kind"] == "run"]
    assert began["plan"]["cluster"]["gpu"]["name"] in ("h100-80gb", "a100-40gb")  # the slowest, not rank 0's own


def why_even(kind: str) -> str | None:
    import trl

    from hf_parallel.ask.session import of_session
    from hf_parallel.hooks import auto

    of_session(auto._Shown).arguments = getattr(trl, kind)("out", use_cpu=True, bf16=False, report_to=[])
    return auto._find_reason_for_even(LlamaConfig(architectures=["LlamaForCausalLM"]))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("SFTConfig", None),
        ("DPOConfig", None),
        ("GRPOConfig", "GRPOConfig is of a trainer that compares"),
        ("RLOOConfig", "RLOOConfig is of a trainer that compares"),
    ],
    ids=str,
)
def test_trainers_that_compare_examples_have_even_shares(kind, words):
    pytest.importorskip("trl")
    found = run_alone(why_even, kind)
    assert found is None if words is None else words in found


# ---- the order of devices -------------------------------------------------------------------------------------------


def started(spec: str, devices: list[Device]) -> list[str]:
    """What is said at the start of a layout on these devices; H100s multiply three times as fast."""
    from hf_parallel.hooks import activation, report

    rank, said = int(os.environ["RANK"]), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        from hf_parallel.hooks import device_order

        patch.setattr(device_order, "read_device_here", lambda: devices[rank])
        patch.setattr(rates, "measure_product_rate", lambda device: 3.0 if "H100" in devices[rank].name else 1.0)
        patch.setattr(report, "say", said.append)
        activation.activate(spec, "the test")
    return [line for line in said if "order of GPUs" in line]


@pytest.mark.parametrize(
    "spec", ["dp_shard=4,batch_shares=3x2:1x2", "pp=2,dp_shard=2,pipeline_split=[3,1]", "pp=4,pipeline_split=3:3:1:1"]
)
def test_the_order_of_nodes_that_works(spec):
    """Fast nodes come first in these specs; the line names that order, and nothing is said of it."""
    (line,) = run(started, 4, spec, on_hosts(A100, H100))[0]
    assert f"{A100[0]} (rank 0, …) has 3 x the work of {H100[0]} (rank 2, …), which is 3 x as fast" in line
    assert line.endswith("start nodes in this order: host1, host0")
    assert run(started, 4, spec, on_hosts(H100, A100))[0] == []


def test_the_order_of_devices_of_a_machine():
    devices = [Device("one", *kind) for kind in (A100, H100)]
    (line,) = run(started, 2, "dp_shard=2,batch_shares=2:1", devices)[0]
    assert line.endswith("CUDA_VISIBLE_DEVICES=1,0 gives the fast ones more")
    assert run(started, 2, "dp_shard=2,batch_shares=1:2", devices)[0] == []
    assert run(started, 2, "dp_shard=2", devices)[0] == []


# ---- unlike vendors -------------------------------------------------------------------------------------------------


def on_platforms(names: list[str]) -> None:
    from hf_parallel.hooks import activation, rendezvous

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "name_platform", lambda: names[int(os.environ["RANK"])])
        activation.activate("dp_shard=2", "the test")


def test_unlike_vendors_are_refused_before_they_meet():
    words = "rank 1 on ROCm: rank 0 computes on CUDA, .*; start processes on CUDA alone"
    with pytest.raises(RankFailure, match=words):
        run(on_platforms, 2, ["CUDA", "ROCm"], init=False)
    run(on_platforms, 2, ["CUDA", "CUDA"], init=False)


# ---- plan --detect --------------------------------------------------------------------------------------------------

#: A process of a launcher, on a device of its own whose driver is a pretended one.
PRETENDS = """
import os, sys, types, torch
from hf_parallel.planner import detect
kinds = {kinds}
def device_here(index=None):
    rank = int(os.environ["RANK"])
    return detect.Device(f"host{{rank}}", *kinds[rank])
detect.read_device_here = device_here
from hf_parallel import cli
from tests.refusals import pattern_of_refusal
sys.exit(cli.main(sys.argv[1:]))
"""


def launched(script: str, *argv: str) -> subprocess.CompletedProcess:
    """Two processes of torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, *argv], env=environment, capture_output=True, text=True, timeout=120)


def test_detected_under_a_launcher(tmp_path):
    """The file has a group of each process's kind, and a plan reads it."""
    script, path = tmp_path / "plan.py", str(tmp_path / "found.yaml")
    script.write_text(PRETENDS.format(kinds=[H100, A100]))
    done = launched(str(script), "plan", "--detect", "--save-cluster", path)
    assert done.returncode == 0, done.stderr
    assert f"--cluster {path} plans for these machines" in done.stderr
    mixed = read_machines(path)
    assert [(group.name, group.cluster.gpus) for group in mixed.groups] == [("h100-80gb", 1), ("a100-40gb", 1)]
    assert [group.cluster.gpu.memory_gib for group in mixed.groups] == [79.2, 39.4]
    numbers = tmp_path / "model.json"
    numbers.write_text(json.dumps({"layers": 4, "hidden": 512, "heads": 8, "ffn_hidden": 2048, "vocab": 515}))
    assert cli.main(["plan", str(numbers), "--cluster", path, "--global-batch", "8", "--seq", "256"]) == 0


def test_detected_processors_of_a_launcher(tmp_path):
    script, path = tmp_path / "plan.py", str(tmp_path / "found.yaml")
    script.write_text("import sys\nfrom hf_parallel import cli\nsys.exit(cli.main(sys.argv[1:]))\n")
    done = launched(str(script), "plan", "--detect", "--save-cluster", path)
    assert done.returncode == 0, done.stderr
    cluster = read_machines(path)
    assert (cluster.gpu.name, cluster.gpus, cluster.per_node) == (CPU, 2, 2)


@pytest.mark.parametrize("name", ["h100-80gb", "v100-16gb", "rtx-4090"])
def test_a_file_of_machines_is_read_back(tmp_path, name):
    path = str(tmp_path / "own.yaml")
    cluster = make_cluster(name, 6, 2, "ethernet-25g")
    write_machines(path, cluster)
    assert read_machines(path) == cluster


def test_measured_processors_are_read_back(tmp_path):
    path, own = str(tmp_path / "own.yaml"), detect(3, 3)
    write_machines(path, own)
    found = read_machines(path)
    assert found.gpu.peaks == pytest.approx(own.gpu.peaks)
    assert found.gpu.efficiency == own.gpu.efficiency
    assert found.gpu.bandwidth == pytest.approx(own.gpu.bandwidth)
    assert (found.gpu.name, found.gpu.capability, found.inside.name) == ("cpu", (0, 0), own.inside.name)


def test_memory_that_hardly_differs_is_one_kind():
    near = [Device("a", H100[0], gib) for gib in (79.49, 79.51, 79.2)]
    assert detecting.number_kinds_of(near) == [0, 0, 0]
    assert detecting.number_kinds_of([*near, Device("b", H100[0], 94.0), Device("b", *A100)]) == [0, 0, 0, 3, 4]
    here = make_cluster("h100-80gb", 3)
    assert group_devices(here, near) is here


def test_a_machine_without_an_accelerator():
    from hf_parallel.ask.config import SpecError

    with pytest.raises(SpecError, match=pattern_of_refusal("slow", works="no process there")):
        group_devices(make_cluster("h100-80gb", 2), [Device("a", *H100), Device("slow", CPU, 0.0)])
