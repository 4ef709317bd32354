"""`trl distillation` as installed: losses, entropies and weights of one process, on data ranks and under tp.

Draws belong to rows here (`rollouts.py`), else other numbers of data ranks draw other tokens.
"""

import pytest

from tests.distributed import RankFailure

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("trl.trainer.distillation_trainer", reason="the first TRL with this trainer is 1.16")

from tests.training import pairs
from tests.trl_scripts import LORA

#: The teacher is a model of another width, and with a vocabulary that two ranks do not divide.
BASE = (
    "--teacher_model_name_or_path MODEL:wide --max_completion_length 8 --max_steps 4 "
    '--generation_kwargs {"use_cache":true} '
)
CASES = {
    # A generation batch of two micro-batches is shuffled over all data ranks.
    "accumulated": "--gradient_accumulation_steps 2 --beta 0.3 --temperature 0.8",
    "adapters": f"{LORA} --gradient_accumulation_steps 2 --beta 1.0",
    # 13 prompts: the last batch has 5 rows, and leaves none for the last of four data ranks.
    "evaluated": "--eval_strategy steps --eval_steps 2 --log_completions true --beta 0.0",
}


@pytest.mark.support("trl distillation")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "accumulated": "dp_shard=2 dp_replicate=2 tp=2 dp_shard=2,tp=2",
            "adapters": "dp_shard=2 tp=2",
            "evaluated": "dp_shard=2 dp_shard=2,tp=2",
        }
    ),
)
def test_losses_of_one_process(trl_runs, case, spec):
    trl_runs.check("distillation", "prompt", BASE + CASES[case], spec)


def test_data_ranks_without_a_row(trl_runs):
    trl_runs.check("distillation", "prompt", BASE + CASES["evaluated"], "dp_shard=4")


@pytest.mark.parametrize(
    ("spec", "flags", "asked", "works"),
    [
        ("pp=2", "", "pp_size=2", "tp_size=2 works"),
        ("cp=2", "", "cp_size=2", "tp_size=2 works"),
        ("tp=2", "--use_vllm true", "use_vllm=True", "use_vllm=False works"),
    ],
)
def test_what_cannot_hold_is_refused(trl_runs, spec, flags, asked, works):
    with pytest.raises(RankFailure) as failure:
        trl_runs.parallel("distillation", "prompt", BASE + flags, spec)
    assert f"DistillationTrainer with {asked}" in failure.value.message
    assert works in failure.value.message
