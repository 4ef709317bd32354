"""`trl grpo` and `trl rloo` as installed, on every layout: rewards, losses and weights of one process.

Draws belong to rows here (`rollouts.py`), else other numbers of data ranks draw other tokens; rows end at different
places, so that data ranks generate for different times. With one data rank real draws are compared too.
"""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import RankFailure, run

pytest.importorskip("trl")
pytest.importorskip("datasets")
import pandas
import torch

from tests import rollouts, trl_scripts
from tests.training import activate, pairs
from tests.trl_scripts import LORA, SYNCED

#: With a key/value cache, which the tiny models leave out.
BASE = (
    "--reward_funcs tests.rollouts.reward tests.rollouts.second_reward --num_generations 2 --max_completion_length 8 "
    '--max_steps 4 --generation_kwargs {"use_cache":true} '
)
#: What TRL writes to a checkpoint about a coefficient that follows the entropy.
CONTROL = "entropy_ctrl_state.json"
#: 13 prompts: 26 rows, of which the last batch leaves 2 for the first data rank and none for the second.
EVALUATED = "--eval_strategy steps --eval_steps 2 "
CASES = {
    # A generation batch serves two steps of two micro-batches, twice: shuffled, with log-probabilities kept.
    "reference": (
        f"--beta 0.1 {SYNCED} --gradient_accumulation_steps 2 --steps_per_generation 4 --num_iterations 2 "
        "--num_generations 8 --loss_type bnpo"  # a group lies on all data ranks
    ),
    "adapters": f"{LORA} --beta 0.1 --gradient_accumulation_steps 2",
    "evaluated": f"--loss_type grpo --scale_rewards batch --top_entropy_quantile 0.5 {EVALUATED}",
    "evaluated-dapo": f'--beta 0.1 --generation_kwargs {{"use_cache":false}} {EVALUATED}',
    "model": "--reward_model_name_or_path MODEL:scores --mask_truncated_completions true "
    "--importance_sampling_level sequence --log_completions true",
    # All tokens have nearly one entropy in the first step, where the loss looks like a mean over rows.
    "entropy": "--model_name_or_path MODEL:level --loss_type dr_grpo --entropy_coef 0.5 --learning_rate 0.5",
    # The last evaluated batch leaves a data rank without a row: what is repeated there is not logged either.
    "logged": "--reward_funcs tests.rollouts.logged_reward tests.rollouts.second_reward --log_completions true "
    + EVALUATED,
    "rloo": f"--beta 0.1 --gradient_accumulation_steps 2 {EVALUATED}",
}


@pytest.mark.support("trl grpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "reference": "dp_shard=2,tp=2 dp_replicate=2 pp=2 dp_shard=2,pp=2",
            "adapters": "dp_shard=2,tp=2 dp_shard=2,pp=2",
            "evaluated": "dp_shard=2 dp_shard=2,pp=2",
            "evaluated-dapo": "dp_shard=2 dp_shard=2,pp=2",
            "model": "tp=2 dp_shard=2 pp=2",
            "entropy": "pp=2 tp=2",
            "logged": "dp_shard=2 dp_replicate=2,pp=2",
        }
    ),
)
def test_grpo(trl_runs, case, spec):
    asked = ("grpo", "prompt", BASE + CASES[case])
    ranks = trl_runs.check(*asked, spec)
    if "log_completions" in asked[-1]:
        found, expected = (read_completions(run.folder) for run in (ranks[0], trl_runs.reference(*asked)))
        pandas.testing.assert_frame_equal(found, expected, rtol=1e-4, atol=1e-4)


def read_completions(run_folder) -> pandas.DataFrame:
    """The prompts, completions, rewards and advantages of all steps, as TRL writes them down."""
    files = sorted(Path(run_folder, "completions").iterdir())
    assert len(files) == 4  # steps
    return pandas.concat([pandas.read_parquet(file) for file in files])


@pytest.mark.parametrize("spec", ["cp=2", "tp=2", "pp=2"])
def test_one_rank_of_a_model_rewards(trl_runs, spec):
    trl_runs.check("grpo", "prompt", BASE + "--reward_funcs tests.rollouts.reward_of_rank", spec)


def test_a_coefficient_that_follows_the_entropy_is_resumed(trl_runs):
    """The last stage alone computes the loss, which moves it; rank 0 writes it down."""
    asked = (
        BASE
        + "--use_adaptive_entropy true --entropy_target 40 --entropy_coef_delta 0.05 --generation_kwargs "
        + ('{"do_sample":false} --save_strategy steps --save_steps 2')
    )
    saved = trl_runs.reference("grpo", "prompt", asked), trl_runs.parallel("grpo", "prompt", asked, "pp=2")[0]
    expected, found = (json.loads(Path(run.folder, "checkpoint-2", CONTROL).read_text()) for run in saved)
    assert found == pytest.approx(expected, rel=1e-6)  # one rounding of an entropy
    trl_runs.check("grpo", "prompt", f"{asked} --resume_from_checkpoint {saved[1].folder}/checkpoint-2", "pp=2")


@pytest.mark.support("trl rloo")
@pytest.mark.parametrize(("case", "spec"), pairs({"rloo": "dp_shard=2 tp=2 dp_shard=2,pp=2"}))
def test_rloo(trl_runs, case, spec):
    trl_runs.check("rloo", "prompt", BASE + CASES[case], spec)


@pytest.mark.parametrize(("spec", "seed_steps"), [("tp=2", True), ("tp=2", False), ("pp=2", False)])
def test_real_draws(trl_runs, spec, seed_steps):
    """From the same random state the ranks of one model draw what one process draws, step after step."""
    asked = ("grpo", "prompt", BASE + "--max_completion_length 4 --max_steps 6")  # of two epochs
    how = (partial(trl_scripts.script, batch=32, real_draws=True, seed_steps=seed_steps),)
    (expected,) = trl_runs.run(1, *asked, how=how)
    lengths = [log["num_tokens"] for log in expected.logs if "num_tokens" in log]
    for outcome in trl_runs.run(2, *asked, spec, how=how):
        assert [log["num_tokens"] for log in outcome.logs if "num_tokens" in log] == lengths
        for ours, theirs in zip(outcome.logs[:-1], expected.logs[:-1], strict=True):
            for key in ("reward", "loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5)  # as in test_trl.py


def test_data_ranks_draw_apart(trl_runs):
    """The ranks of one model go on from one seed, other data ranks from others."""
    call = partial(trl_scripts.generating, "GRPO", trl_runs.model("llama"), trl_runs.out(), "dp_shard=2,tp=2", {})
    assert run(call, 4, init=False) == [42, 42, 43, 43]


def shuffled(spec: str) -> list[int]:
    """The rows of each part of a generation batch, as this rank takes them apart."""
    from trl.trainer import utils

    activate(spec)
    torch.manual_seed(int(os.environ["RANK"]))  # stages drop out apart
    batch = utils.shuffle_sequence_dict({"prompt_ids": torch.arange(16)})
    return torch.cat([part["prompt_ids"] for part in utils.split_tensor_dict(batch, 4)]).tolist()


def test_stages_take_rows_in_one_order():
    first, second = run(shuffled, 2, "pp=2", init=False)
    assert first == second != sorted(first)
    assert sorted(first) == list(range(16))


REFUSED = [
    ("RLOO", "tp=2", {"use_vllm": True, "vllm_mode": "colocate"}, {}, "vllm_mode=colocate.*vllm_mode=server works"),
    ("GRPO", "dp_shard=2", {"entropy_coef": 0.1}, {}, "entropy_coef=0.1.*2 data ranks.*entropy_coef=0"),
    ("GRPO", "tp=2", {}, {"rollout_func": rollouts.reward}, "rollout_func.*own generation works"),
]


@pytest.mark.parametrize(
    ("kind", "spec", "settings", "more", "message"), REFUSED, ids=[row[-1][:10] for row in REFUSED]
)
def test_what_cannot_hold_is_refused(trl_runs, kind, spec, settings, more, message):
    model = trl_runs.model("llama")
    call = partial(trl_scripts.generating, kind, model, trl_runs.out(), spec, settings, **more)
    with pytest.raises(RankFailure, match=f"{kind}Trainer with {message}"):
        run(call, 2, init=False)


def evaluate_stream(model: str, out: str) -> None:
    """A trainer that is given a data set without a length when it evaluates."""
    import datasets
    import trl

    activate("dp_shard=2")
    prompts = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "num_generations": 2}
    arguments = trl.RLOOConfig(out, report_to="none", bf16=False, use_cpu=True, max_completion_length=2, **sizes)
    trainer = trl.RLOOTrainer(model, rollouts.reward, arguments, prompts)
    trainer.evaluate(prompts.to_iterable_dataset())


def test_evaluation_of_a_stream_is_refused(trl_runs):
    with pytest.raises(RankFailure, match="eval_dataset without a length.*2 data ranks.*a Dataset works"):
        run(partial(evaluate_stream, trl_runs.model("llama"), trl_runs.out()), 2, init=False)
