"""A Ray cluster of several nodes on this machine: an unchanged script ends where an undisturbed one does.

Each starts Ray, and its ranks two or three times, in about a minute; Ray is no part of what `make test` installs.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests import rollout_servers, trl_scripts
from tests.distributed import run, run_alone
from tests.ports import held_port
from tests.refusals import find_line
from tests.reliability.launching import launch, write_script
from tests.reliability.test_elastic import differences

pytest.importorskip("ray")

#: Two nodes of two CPUs beside the head; `PLACE` is where notes and checkpoints lie.
CLUSTER = """
import os, subprocess, sys, threading, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

place = Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
"""
BY_COMMAND = """
command = [sys.executable, *sys.argv[2:]]
code = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""
LAUNCH = ("-m", "hf_parallel.cli", "launch", "--ray")
IN_THREE_LINES = """
ray.init(address=cluster.address)

def lose_a_node():
    while not (place / "owner").exists():
        time.sleep(0.1)
    owner = int((place / "owner").read_text())
    cluster.remove_node(next(node for node in nodes if node.all_processes["raylet"][0].process.pid == owner), False)

threading.Thread(target=lose_a_node, daemon=True).start()
from hf_parallel.cli.ray_launcher import trainer
trainer(sys.argv[2], sys.argv[3:], parallel="tp=2,dp_shard=-1", num_processes=4, min_processes=2, max_restarts=2).fit()
ray.shutdown()
cluster.shutdown()
"""
ACCIDENT = """
def on_train_begin(self, args, state, control, **kwargs):
    where = [rank, attempt, os.getppid(), os.environ.get("RAY_RAYLET_PID")]
    (folder / f"rank-{rank}-{attempt}-{name}").write_text(json.dumps(where))

def on_step_begin(self, args, state, control, **kwargs):
    if name == "killed" and rank == "1" and (attempt, state.global_step) in ((0, 2), (1, 5)):
        os.kill((os.getpid(), os.getppid())[attempt], signal.SIGKILL)  # a rank, then the worker that started it
    if name == "lost" and attempt == 0 and state.global_step == 3:
        if rank == "3":
            (folder / "new").write_text(os.environ["RAY_RAYLET_PID"])
            (folder / "new").rename(folder / "owner")
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def wanted(request):
    """Minutes of work, which a plain run has not."""
    if not request.config.getoption("--all") and not any("::" in argument for argument in request.config.args):
        pytest.skip("run by `pytest --all`, or by name")


@pytest.fixture
def script(tmp_path) -> Path:
    return write_script(tmp_path / "train.py", ACCIDENT, steps=8)


def on_ray(driver: str, place: Path, *words: str, cpus: int = 2):
    """The driver in a process of its own: Ray's threads would be forked with this one."""
    path = place / "driver.py"
    path.write_text(CLUSTER.replace("num_cpus=2", f"num_cpus={cpus}") + driver)
    ended = launch([sys.executable, str(path)], str(place), *words, timeout=280)
    assert ended.code == 0, ended.err[-5000:] + ended.out[-5000:]
    return ended.out + ended.err


def losses(place: Path, how: str) -> list:
    return json.loads((place / f"{how}.json").read_text())


def places(place: Path, attempt: int, how: str) -> dict[int, tuple[int, str]]:
    """Of each rank: the process that started it, and the node that it is on."""
    notes = [json.loads(path.read_text()) for path in place.glob(f"rank-*-{attempt}-{how}")]
    return {int(rank): (parent, node) for rank, _, parent, node in notes}


@pytest.mark.slow
def test_two_lost_workers_change_nothing(script, tmp_path):
    """A rank is killed, then a worker of Ray, which takes its ranks along: every loss is equal bit for bit."""
    words = [*LAUNCH, "--num_processes", "2", "--max_restarts", "2", "--parallel", "dp_shard=-1", str(script)]
    said = on_ray(BY_COMMAND, tmp_path, *words, str(tmp_path), "killed", "2")
    for step in (2, 4):
        assert find_line(said, "again", f"{tmp_path}/killed/checkpoint-{step}")
    run(undisturbed, 2, str(script), str(tmp_path), "2", init=False)
    killed, through = losses(tmp_path, "killed"), losses(tmp_path, "through")
    assert [killed[0], through[0]] == [2, 0]
    assert killed[1] == through[1]
    assert set(killed[1]) == {str(step) for step in range(1, 9)}


def undisturbed(script: str, place: str, batch: str, spec: str | None = "dp_shard=-1") -> None:
    """The same script on ranks of the harness, or in one plain process."""
    if spec is not None:
        from hf_parallel.hooks import activation

        activation.activate(spec, source="test")
    sys.argv = [script, place, "through", batch]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
def test_a_lost_node(script, tmp_path):
    """Elastic: two tp groups on two nodes, then one. No group is cut, and the losses are those of one process."""
    said = on_ray(IN_THREE_LINES, tmp_path, str(script), str(tmp_path), "lost", "4")
    assert find_line(said, "again", f"{tmp_path}/lost/checkpoint-2")
    before, after = places(tmp_path, 0, "lost"), places(tmp_path, 1, "lost")
    assert sorted(before) == [0, 1, 2, 3]
    assert sorted(after) == [0, 1]
    assert before[0] == before[1] != before[2] == before[3]
    assert before[0][1] != before[2][1]  # the groups lie on different nodes
    assert after[0][1] == after[1][1] == before[0][1]
    run_alone(undisturbed, str(script), str(tmp_path), "8", None)
    assert differences(losses(tmp_path, "lost")[1], losses(tmp_path, "through")[1]) == []


GRPO = (
    "--num_generations 2 --max_completion_length 8 --max_steps 3 --beta 0.1 --save_strategy steps --save_steps 3 "
    '--generation_kwargs {"seed":1} --optim sgd --learning_rate 0.1 --logging_steps 1 --report_to none --use_cpu true '
    "--bf16 false --per_device_train_batch_size 4"
)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--reference --one_step_behind"])
def test_policy_rollouts_and_rewards_as_actors(tmp_path, more):
    """What each step logs is what it logs without Ray, with a server beside it; draws belong to prompts."""
    runs = trl_scripts.TrlRuns(tmp_path)
    model = runs.model("llama")
    words = ["integrations/ray/grpo.py", "--model", model, "--reward", "tests.rollouts.reward", *more.split()]
    words += ["--num_processes", "2", "--parallel", "dp_shard=2", "--output_dir", str(tmp_path / "out"), *GRPO.split()]
    words += ["--dataset_name", str(tmp_path / "data" / "prompt")]
    with held_port() as group:  # an actor of the cluster takes one CPU
        on_ray(BY_COMMAND, tmp_path, *words, "--vllm_group_port", str(group), cpus=3 if more else 2)
    found = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    with rollout_servers.running(model) as server:
        flags = f"{GRPO} --reward_funcs tests.rollouts.reward {server.flags}"
        spec = "dp_shard=2,rollouts=one_step_behind" if more else "dp_shard=2"
        expected = runs.parallel("grpo", "prompt", flags, spec)[0].logs
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=False):  # theirs end with the means of the run
        for key in ("reward", "loss", "grad_norm", "kl", "completions/mean_length"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
