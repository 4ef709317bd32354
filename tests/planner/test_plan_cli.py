"""`hf-parallel plan`: table, JSON, specs, pictures, own clusters, and what it refuses in one line."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import six_plans
from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.hooks.auto import make_acceptance_test, make_engine_options
from hf_parallel.planner import make_cluster
from hf_parallel.planner.detect import detect
from hf_parallel.planner.groups import read_machines
from hf_parallel.planner.search import search
from tests import models
from tests.commands import ROOT
from tests.distributed import run_alone

SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
WHERE = ["--gpus", "8", "--gpu", "a100-80gb", "--seq", "256", "--global-batch", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    models.llama(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return str(path)


def planned(capsys, *argv):
    assert cli.main(["plan", *argv]) == 0
    return capsys.readouterr().out


def test_table(folder, capsys):
    out = planned(capsys, folder, *WHERE, "--top", "3", "--dollars", "2.5", "--parallel", "tp=8")
    assert "LlamaForCausalLM" in out
    assert "$ / 1e9 tokens" in out
    assert "Run the first:  hf-parallel launch --num_processes 8 --parallel" in out
    assert "yours (dp_shard=1,tp=8)" in out


def test_json_from_a_file_and_from_numbers(folder, capsys, tmp_path):
    table = json.loads(planned(capsys, f"{folder}/config.json", *WHERE, "--json"))
    assert table["layouts"][0].keys() >= {"spec", "step_time_s", "memory", "time", "bytes_by_axis", "mfu"}
    numbers = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn_hidden": 1024, "vocab": 64}
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    other = json.loads(planned(capsys, str(tmp_path / "numbers.json"), *WHERE, "--json"))
    assert other["layouts"][0]["step_time_s"] == pytest.approx(table["layouts"][0]["step_time_s"], rel=0.1)


def test_critical_batch(capsys, tmp_path):
    """Far below the critical batch more sequences save steps; far above it they cost time alone."""
    numbers, found = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn_hidden": 1024, "vocab": 64}, {}
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    given = [str(tmp_path / "numbers.json"), *WHERE[2:6], "--gpus", "4"]
    for critical in (2, 64, 4096):
        table = json.loads(planned(capsys, *given, "--critical-batch", str(critical), "--json"))
        times = [layout["step_time_s"] * (1 + critical / layout["sequences_per_step"]) for layout in table["layouts"]]
        assert [layout["seconds_to_loss"] for layout in table["layouts"]] == pytest.approx(times)
        assert times[0] <= 1.05 * min(times) * 1.05**3  # memory decides between near ones, few axes are preferred
        assert critical / 8 <= table["layouts"][0]["sequences_per_step"] <= max(4, 4 * critical)
        found[critical] = table["layouts"][0]["sequences_per_step"]
    assert found[2] < found[64] < found[4096], found


def test_critical_batch_of_a_fixed_one(folder, capsys):
    """The table says how many steps it takes; layouts of one batch keep their order."""
    plain = json.loads(planned(capsys, folder, *WHERE, "--json"))
    critical = json.loads(planned(capsys, folder, *WHERE, "--json", "--critical-batch", "96"))
    assert [one["spec"] for one in critical["layouts"]] == [one["spec"] for one in plain["layouts"]]
    assert critical["layouts"][0]["steps_factor"] == pytest.approx(1 + 96 / 32)
    out = planned(capsys, folder, *WHERE, "--critical-batch", "96", "--top", "2")
    assert all(
        words in out for words in ("x time to loss", "1 + 96 / batch", "with 32, takes 4 times the fewest steps")
    )
    assert "critical_batch" in refused(capsys, folder, *WHERE, "--critical-batch", "-1").replace("-batch", "_batch")


def test_specs_are_ready_for_parallel(folder, capsys, tmp_path):
    table = json.loads(planned(capsys, folder, *WHERE, "--json", "--specs", str(tmp_path / "specs"), "--top", "4"))
    files = sorted((tmp_path / "specs").iterdir())
    assert [file.name for file in files] == ["01.yaml", "02.yaml", "03.yaml", "04.yaml"]
    specs = [ParallelConfig.parse(str(file)) for file in files]
    assert specs == [ParallelConfig.parse(layout["spec"]) for layout in table["layouts"]]


def test_pictures(folder, capsys, tmp_path):
    memory, timeline = tmp_path / "memory.svg", tmp_path / "timeline.svg"
    planned(capsys, folder, *WHERE, "--top", "40", "--picture", str(memory), "--timeline", str(timeline))
    parts = [x for x in ET.parse(memory).iter() if x.get("class") == "part"]
    widths = [float(part.get("width")) for part in parts]
    assert len(parts) > 40
    assert min(widths) > 0
    assert any("box" in x.get("class", "") for x in ET.parse(timeline).iter())


def test_png(folder, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / "memory.png", tmp_path / "timeline.png"]
    planned(capsys, folder, *WHERE, "--top", "40", "--picture", str(files[0]), "--timeline", str(files[1]))
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def verified(folder, *training):
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main(["plan", folder, *WHERE, "--top", "1", "--verify", *training])
    return code, out.getvalue(), said.getvalue()


@pytest.mark.parametrize(
    "training",
    [
        ("--device", "cuda"),
        ("--precision", "mixed", "--lora", "4"),
        ("--parallel", "tp=2,dp_replicate=4,tp_overlap=true,compile=regional"),  # products are fused on GPUs alone
        *(("--parallel", f"pp=2,dp_replicate=4,pipeline_schedule={name}") for name in ("pipedream_2bw", "chimera")),
    ],
)
def test_verify_runs_the_real_code(folder, training):
    """What is planned and what is dry-run stand side by side, 5 % apart at most."""
    code, out, said = run_alone(verified, folder, *training)
    assert code == 0
    assert re.search("Dry run of .* on cpu", out)
    assert "--parallel" not in training or training[1].rpartition("=")[2] in out.partition("Dry run of")[2]
    assert ("the branches for CPUs run" in said) == ("cuda" in training)
    cells = next(line for line in out.splitlines() if "(pp=0)" in line).replace("│", " ").split()
    assert float(cells[2]) == pytest.approx(float(cells[3]), rel=0.05, abs=0.01)  # GiB with two digits


CLUSTER = """
gpu: {like: h100-80gb, name: mine, memory_gib: 60, tflops: {bf16: 500}}
gpus_per_node: 4
network: {name: two cables, gb_s: 3, latency_us: 20}
"""


def test_own_cluster(folder, capsys, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    cluster = read_machines(str(path), 8)
    assert (cluster.gpu.name, cluster.gpu.memory_gib, cluster.per_node, cluster.nodes) == ("mine", 60, 4, 2)
    assert cluster.gpu.peak("bf16") == 500e12
    assert (cluster.between.bandwidth, cluster.inside.name) == (3e9, "nvlink4")
    out = planned(capsys, folder, "--cluster", str(path), "--gpus", "8", "--seq", "256", "--global-batch", "32")
    assert "8 x mine (nvlink4 in nodes of 4, two cables between)" in out


def test_a_cluster_file_says_how_many_gpus_a_node_has(folder, capsys, tmp_path):
    (tmp_path / "own.yaml").write_text("gpu: h100-80gb\ngpus: 8\n")
    assert cli.main(["plan", folder, "--cluster", str(tmp_path / "own.yaml"), "--gpus-per-node", "4"]) == 2
    assert "--gpus-per-node 4" in capsys.readouterr().err
    (tmp_path / "own.yaml").write_text("gpu: h100-80gb\ngpus: 8\ngpus_per_node: 4\n")
    assert cli.main(["plan", folder, "--cluster", str(tmp_path / "own.yaml")]) == 0


def test_detect(folder, capsys):
    cluster = detect(4, 4)
    assert (cluster.gpus, cluster.nodes) == (4, 1)
    assert cluster.gpu.peak("fp32") > 1e8
    assert cluster.gpu.memory_gib > 0
    assert "layouts looked at" in planned(capsys, folder, "--detect", "--gpus", "4", "--seq", "64")


def refused(capsys, *argv, code=2):
    assert cli.main(["plan", *argv]) == code
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    return err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--gpu", "--cluster", "--detect"]),
        (["--gpu", "a100-80gb"], ["--gpus"]),
        (["--gpu", "a100-80gb", "--detect"], ["--gpu and --detect"]),
        (["--gpu", "h1000", "--gpus", "8"], ["gpu=h1000", "h100-80gb"]),
        (["--gpu", "h100-80gb", "--gpus", "8", "--network", "wet-string"], ["network=wet-string"]),
        (["--cluster", "missing.yaml"], ["missing.yaml"]),
        ([*WHERE, "--parallel", "tp=5"], ["tp=5", "8 processes"]),
        ([*WHERE, "--picture", "memory.gif"], ["memory.gif", ".svg"]),
        ([*WHERE, "--top", "0"], ["--top 0"]),
        ([*WHERE, "--precision", "int3"], ["precision=int3"]),
        ([*WHERE, "--optimizer", "adamax"], ["optimizer=adamax", "adamw_8bit"]),
    ],
)
def test_refusals(folder, capsys, argv, words):
    cli_argv = [folder, *argv]
    if "--picture" in argv:
        assert cli.main(["plan", *cli_argv]) == 2
        err = capsys.readouterr().err
    else:
        err = refused(capsys, *cli_argv)
    assert [word for word in words if word not in err] == [], err


def test_model_that_is_not_there(capsys, tmp_path):
    said = refused(capsys, str(tmp_path / "no-such-folder"), *WHERE)
    assert "no-such-folder" in said
    assert '"layers": 32' in said


def test_vision_model(capsys, tmp_path):
    """Its code does not take rows of tokens, so nothing is counted from dry runs."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    out = planned(capsys, str(tmp_path), "--gpus", "4", "--gpu", "a100-80gb", "--seq", "197", "--global-batch", "64")
    assert "ViTForImageClassification" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [("gpus: 8\n", "gpu"), ("gpu: h100-80gb\n", "--gpus 8"), ("gpu: h100-80gb\ngpuz: 1\n", "gpuz is no key")],
)
def test_cluster_files_that_are_wrong(folder, capsys, tmp_path, text, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert words in refused(capsys, folder, "--cluster", str(path))


def test_nothing_fits(folder, capsys):
    assert "nothing fits" in refused(capsys, folder, *WHERE, "--memory", "0.5", code=1)


def test_experts_over_more_than_two_data_ranks_are_asked_about():
    """The engine is asked with few data ranks, which are as many as share experts."""
    accept = make_acceptance_test(models.deepseek_moe())
    assert accept(ParallelConfig(dp_shard_size=8, ep_size=4))
    assert accept(ParallelConfig(dp_shard_size=4, tp_size=2, ep_size=8))


def make_narrow_pair(host_gib):
    """Two GPUs of 3 GiB, whose host has little memory too."""
    cluster = make_cluster("a100-80gb", 2)
    host = dataclasses.replace(cluster.gpu.host, memory_gib=host_gib)
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=3, host=host))


@pytest.mark.parametrize(("host_gib", "offload"), [(1000, "optimizer"), (1, "nvme:PATH")])
def test_files_are_proposed_where_the_host_has_no_room(host_gib, offload):
    """The folder is for the user to name; the engine is asked with one that exists, and refuses PATH at a start."""
    model = models.llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16)
    known = make_engine_options(model, 0, False)
    found = search(model=model, cluster=make_narrow_pair(host_gib), seq=256, global_batch=2, top=1, **known)
    assert found.best.config.offload == offload, found.advice


def cheapest_plan():
    """The lines of an answer, without what its dry run has."""
    return list(six_plans.write_answer("8B LoRA on 1 x 24 GB", dry=True))


def test_cheapest_of_the_six_plans():
    """docs/reference/six_plans.md has its layout and memory; planned and counted tensors agree within 2 %."""
    lines = run_alone(cheapest_plan)
    page = (ROOT / "docs" / "reference" / "six_plans.md").read_text()
    spec, figures = next(line for line in lines if "--parallel" in line), next(line for line in lines if "GiB" in line)
    assert re.search(r"--parallel (\S+)", spec)[1] in page
    assert figures.strip() in page
    rank, planned, counted, *_ = lines[-1].strip("| ").split(" | ")
    assert rank == "0"
    assert float(planned) == pytest.approx(float(counted), rel=0.02)
