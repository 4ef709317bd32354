"""GRPO on one Ray cluster: policy, rollouts, rewards and, if asked, the reference, as actors on GPUs of their own.

    python integrations/ray/grpo.py --model Qwen/Qwen3-0.6B --reward trl.rewards.accuracy_reward --reference \
        --beta 0.04 --num_processes 4 --parallel dp_shard=2,pp=2 --dataset_name trl-lib/DeepMath-103K \
        --output_dir /shared/out

Taking turns, or with `--one_step_behind` drawing the next step's completions while this one trains. What this file
does not know are flags of `trl grpo`. Started from the repository's root, which all nodes see.

    Rewards  <── texts ──  policy: TorchTrainer, `trl grpo` unchanged  ── prompts, weights ──>  Rollouts
                                                                       ── rows ──>  Reference
"""

import argparse
import importlib
import threading

import ray
from ray.train import FailureConfig, RunConfig

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli.ray_launcher import trainer

NAMESPACE, REWARDS = "hf_parallel", "rewards"


@ray.remote
class Server:
    """Completions, or log-probabilities of a model that stays; put `vllm serve` here where it can be installed."""

    def __init__(self, model: str, dtype: str, reference: bool = False):
        from hf_parallel.rollouts.server import load, load_reference, serve

        self.server = serve((load_reference if reference else load)(model, dtype), "0.0.0.0", 0)
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
    parser.add_argument("--dtype", default="float32", help="of the weights, everywhere")
    parser.add_argument("--reference", action="store_true", help="an actor of its own for the reference model")
    parser.add_argument("--one_step_behind", action="store_true", help="draw the next completions beside the training")
    args, flags = parser.parse_known_args()
    ray.init(namespace=NAMESPACE)
    gpus = min(1, ray.cluster_resources().get("GPU", 0))
    layout = ParallelConfig.parse(args.parallel).to_spec()
    rollouts = Server.options(num_gpus=gpus).remote(args.model, args.dtype)
    if args.one_step_behind:
        layout += ",rollouts=one_step_behind"
    if args.reference:
        reference = Server.options(num_gpus=gpus).remote(args.model, args.dtype, reference=True)
        layout += f",reference={ray.get(reference.address.remote())}"
    rewards = Rewards.options(num_gpus=gpus, name=REWARDS).remote(args.reward)  # kept for as long as the name is held
    flags += ["--model_name_or_path", args.model, "--dtype", args.dtype, "--reward_funcs", "integrations.ray.grpo.ask"]
    flags += ["--use_vllm", "true", "--vllm_mode", "server"]
    flags += ["--vllm_server_base_url", ray.get(rollouts.address.remote())]
    known = {"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
    config = RunConfig(worker_runtime_env=known, failure_config=FailureConfig(max_failures=args.max_restarts))
    policy = {"parallel": layout, "num_processes": args.num_processes, "run_config": config}
    trainer("trl.scripts.grpo", flags, module=True, **policy).fit()
    del rewards


if __name__ == "__main__":
    main()
