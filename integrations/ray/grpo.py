"""GRPO on one Ray cluster: policy, rollouts and rewards as actors on GPUs of their own, taking turns.

    python integrations/ray/grpo.py --model Qwen/Qwen3-0.6B --reward trl.rewards.accuracy_reward \
        --num_processes 4 --parallel dp_shard=2,pp=2 --dataset_name trl-lib/DeepMath-103K --output_dir /shared/out

What this file does not know are flags of `trl grpo`. Started from the repository's root, which all nodes see.

    Rewards  <── texts ──  policy: TorchTrainer, `trl grpo` unchanged  ── prompts, weights ──>  Rollouts
"""

import argparse
import importlib
import threading

import ray
from ray.train import FailureConfig, RunConfig

from hf_parallel.ray import trainer

NAMESPACE, REWARDS = "hf_parallel", "rewards"


@ray.remote
class Rollouts:
    """The server of completions; put `vllm serve` here where it can be installed."""

    def __init__(self, model: str):
        from hf_parallel.rollouts.server import load, serve

        self.server = serve(load(model), "0.0.0.0", 0)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def address(self) -> str:
        """Where the policy asks."""
        return f"http://{ray.util.get_node_ip_address()}:{self.server.server_port}"


@ray.remote
class Rewards:
    """A reward function, with whatever models it loads."""

    def __init__(self, function: str):
        module, _, name = function.rpartition(".")
        self.function = getattr(importlib.import_module(module), name)

    def score(self, columns: dict) -> list:
        """Of the prompts and completions of one data rank."""
        return self.function(**columns)


def ask(**columns) -> list:
    """The reward function that `trl grpo` is given: on each rank of the policy it asks the actor."""
    if not ray.is_initialized():
        ray.init(namespace=NAMESPACE, log_to_driver=False)  # at RAY_ADDRESS
    told = {name: value for name, value in columns.items() if not callable(value) and name != "trainer_state"}
    return ray.get(ray.get_actor(REWARDS).score.remote(told))


def main() -> None:
    """Place the actors, then train until the script ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward", required=True, help="module.function")
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--parallel", required=True)
    parser.add_argument("--max_restarts", type=int, default=0)
    args, flags = parser.parse_known_args()
    ray.init(namespace=NAMESPACE)
    gpus = min(1, ray.cluster_resources().get("GPU", 0))
    rollouts = Rollouts.options(num_gpus=gpus).remote(args.model)
    rewards = Rewards.options(num_gpus=gpus, name=REWARDS).remote(args.reward)  # kept for as long as the name is held
    flags += ["--model_name_or_path", args.model, "--reward_funcs", "integrations.ray.grpo.ask"]
    flags += ["--use_vllm", "true", "--vllm_mode", "server"]
    flags += ["--vllm_server_base_url", ray.get(rollouts.address.remote())]
    known = {"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
    config = RunConfig(worker_runtime_env=known, failure_config=FailureConfig(max_failures=args.max_restarts))
    policy = {"parallel": args.parallel, "num_processes": args.num_processes, "run_config": config}
    trainer("trl.scripts.grpo", flags, module=True, **policy).fit()
    del rewards


if __name__ == "__main__":
    main()
