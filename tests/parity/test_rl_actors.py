"""A policy whose reference is served from elsewhere, and one whose completions are drawn a step ahead.

With a served reference the numbers are those of one process that holds it. One step behind they are those of one
process that is one step behind by hand: it draws with the weights that it had when it drew the last time.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("requests")
pytest.importorskip("peft")

from peft import LoraConfig

from tests import rollout_servers, trl_scripts
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.training import pairs

GRPO = "--reward_funcs tests.rollouts.reward --num_generations 2 --max_completion_length 8 --beta 0.1"
SERVER = "--use_vllm true --vllm_mode server"
#: What is drawn, and how many generations an epoch has: the first of each is drawn with the newest weights.
BEHIND = {
    "epochs": ("--dataset_train_split test --max_steps 5", 3),
    "iterations": ("--num_iterations 2 --max_steps 6 --vllm_importance_sampling_mode token_truncate", 16),
}
REFERENCE = {
    "grpo": ("grpo", "prompt", f"{GRPO} --temperature 0.7 --max_steps 3"),
    "rloo": ("rloo", "prompt", f"{GRPO} --max_steps 3"),
    "dpo": ("dpo", "preference", ""),
}


class ByHand:
    """In the place of TRL's way to a server, in one process."""

    per_epoch = 0

    def __init__(self, model, accelerator, processing_class, max_completion_length, temperature, **settings):
        from hf_parallel.rollouts.server import Engine

        own = type(model)(model.config)  # not a copy: TRL has put a forward into the model
        own.generation_config = model.generation_config
        self.model, self.engine = model, Engine("by hand", own, processing_class)
        self.asked = {"max_tokens": max_completion_length, "temperature": temperature, "logprobs": 0}
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: self.engine.answers["/server_info"]({})["vllm_config"]
        )
        self.calls, self.newest, self.former = 0, None, None

    def sync_weights(self):
        self.newest = copy.deepcopy(self.model.state_dict())

    def generate(self, prompts, images, num_generations, profiler):
        fresh = self.calls % self.per_epoch == 0
        self.engine.model.load_state_dict(self.newest if fresh else self.former)
        self.calls, self.former = self.calls + 1, self.newest
        found = self.engine.complete({**self.asked, "prompt": prompts[::num_generations], "n": num_generations})
        logprobs = [[[value] for value in choice["logprobs"]["token_logprobs"]] for choice in found["choices"]]
        return prompts, [choice["token_ids"] for choice in found["choices"]], logprobs, None


def script_by_hand(per_epoch: int, *args):
    import trl.trainer.grpo_trainer as trainer

    ByHand.per_epoch = per_epoch
    trainer.VLLMGeneration, trainer.is_vllm_available = ByHand, lambda: True
    return trl_scripts.script(*args)


@pytest.mark.support("trl grpo")
@pytest.mark.parametrize(("case", "spec"), pairs({"epochs": "tp=2 dp_shard=2,pp=2", "iterations": "dp_shard=2,pp=2"}))
def test_one_step_behind(trl_runs, case, spec):
    more, per_epoch = BEHIND[case]
    asked = ("grpo", "prompt", f"{GRPO} {more} {SERVER}", f"{spec},rollouts=one_step_behind")
    with rollout_servers.running(trl_runs.model("llama"), by_row=True) as server:
        trl_runs.check(*asked, also=server.flags, alone=(script_by_hand, per_epoch))


@pytest.mark.support("trl {case}")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"grpo": "tp=2 dp_shard=2,pp=2", "rloo": "tp=2", "dpo": "tp=2 dp_shard=2,pp=2"}),
)
def test_a_served_reference(trl_runs, case, spec):
    with rollout_servers.running(trl_runs.model("llama"), reference=True) as server:
        trl_runs.check(*REFERENCE[case], f"{spec},reference={server.url}")


def test_a_reference_of_another_kind(trl_runs):
    """Made as far as the server is asked who it is; no rank holds a weight of a reference by then."""
    settings = {"beta": 0.1, "num_generations": 2, "per_device_train_batch_size": 2}
    model = trl_runs.model("llama")
    with rollout_servers.running(model, reference=True) as server:
        spec = f"tp=2,reference={server.url}"
        call = partial(trl_scripts.generating, "GRPO", model, trl_runs.out(), spec)
        with pytest.raises(
            RankFailure, match=pattern_of_refusal(f"reference={server.url}", "float32", works="--dtype bfloat16")
        ):
            run(call, 2, {**settings, "model_init_kwargs": {"dtype": "bfloat16"}}, init=False)
        with pytest.raises(RankFailure, match="reference=.*: adapters .* works"):
            run(partial(call, settings, peft_config=LoraConfig(r=2)), 2, init=False)
