"""Files for Kubernetes and SkyPilot: what their schemas say of them, and what each pod starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

INTEGRATIONS = Path(__file__).resolve().parents[2] / "integrations"
KUBERNETES = INTEGRATIONS / "kubernetes"
TORCHRUN = 'printf "%s\\n" "$@"; echo "within $TORCH_ELASTIC_SHUTDOWN_TIMEOUT s"'


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


@pytest.mark.parametrize("name", ["statefulset.yaml", "claim.yaml"])
def test_kubernetes_takes_it(name):
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents(name):
        validator.validate(document, validator.latest_version(), strict=True)


def test_jobset_takes_it():
    """Its published models keep all of it: a key that they do not know would be lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    validator = pytest.importorskip("kubernetes_validate")
    (document,) = documents("jobset.yaml")
    spec = document["spec"]
    assert models.JobsetV1alpha2JobSetSpec.from_dict(spec).to_dict() == spec
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "workers"}}
    job |= spec["replicatedJobs"][0]["template"]
    validator.validate(job, validator.latest_version(), strict=True)


def test_skypilot_takes_it():
    jsonschema = pytest.importorskip("jsonschema")
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema.validate(yaml.safe_load((INTEGRATIONS / "skypilot/train.yaml").read_text()), schemas.get_task_schema())


def pods() -> list[tuple[dict, dict]]:
    """The pods of both manifests, and what counts them."""
    job = documents("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (replicas,) = (each["spec"] for each in documents("statefulset.yaml") if each["kind"] == "StatefulSet")
    return [(job["template"]["spec"], job["parallelism"]), (replicas["template"]["spec"], replicas["replicas"])]


def test_manifests_agree():
    """Both train the same, count their pods alike and leave time to save."""
    (first, _), (second, _) = pods()
    assert first["containers"][0]["args"] == second["containers"][0]["args"]
    for pod, number in pods():
        variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert variables["NODES"] == str(number)
        assert pod["terminationGracePeriodSeconds"] > 90
        assert any("start.sh" in word for word in pod["containers"][0]["command"])


@pytest.fixture
def pod(tmp_path):
    """The environment of pod 1 of 2, whose torchrun prints its words."""
    (tmp_path / "bin").mkdir()
    for name, body in (("torchrun", TORCHRUN), ("nvidia-smi", "printf 'GPU 0\\nGPU 1\\n'")):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "NODES": "2", "NODE_RANK": "1", "HEAD": "train-0.train", "JOB": "train"}


def started(env: dict[str, str], *words: str) -> list[str]:
    command = ["bash", str(INTEGRATIONS / "start.sh"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


OPTIONS = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3"]
MEETING = ["--rdzv-id", "train", "--rdzv-backend", "c10d", "--rdzv-endpoint", "train-0.train:29400", "--rdzv-conf"]


def test_a_pod_starts_torchrun_and_the_runner(pod):
    words = ["--parallel", "tp=2", "train.py", "--run_name", "two words"]
    runner = ["-m", "hf_parallel", *words, "within 90 s"]
    assert started(pod, *words) == [*OPTIONS, *MEETING, "is_host=0", *runner]
    assert started(pod | {"NODE_RANK": "0"}, *words) == [*OPTIONS, *MEETING, "is_host=1", *runner]
    assert started(pod | {"GPUS": "1"}, *words)[3] == "1"


@pytest.mark.parametrize("option", ["--output_dir {}", "--output_dir={}"])
def test_a_new_pod_goes_on_from_the_newest_checkpoint(pod, tmp_path, option):
    words = ["train.py", *option.format(tmp_path / "out").split()]
    assert "--resume_from_checkpoint" not in started(pod, *words)
    for name in ("checkpoint-9", "checkpoint-10", "_tmp-checkpoint-11"):
        (tmp_path / "out" / name).mkdir(parents=True)
    assert started(pod, *words)[-3:-1] == ["--resume_from_checkpoint", str(tmp_path / "out/checkpoint-10")]
    chosen = started(pod, *words, "--resume_from_checkpoint", "mine")
    assert chosen[-3:-1] == ["--resume_from_checkpoint", "mine"]


def test_a_pod_that_does_not_know_its_place_says_so(pod):
    del pod["NODE_RANK"]
    done = subprocess.run(
        ["bash", str(INTEGRATIONS / "start.sh")], env=pod, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr
