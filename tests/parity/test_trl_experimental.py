"""TRL's experimental trainers that work: losses, norms, metrics, gradients and weights of one process.

Draws belong to rows here (`rollouts.py`), else other numbers of data ranks draw other tokens.
"""

from functools import partial

import pytest

from tests.distributed import RankFailure

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")

from tests import trl_scripts
from tests.training import pairs
from tests.trl_scripts import LORA, RAGGED

ADAPTERS = f"{LORA} --gradient_accumulation_steps 2 {RAGGED}"
EVALUATED = "--eval_strategy steps --eval_steps 2"
CPO = {
    "whole": RAGGED,
    "adapters": f"{ADAPTERS} --loss_type simpo --cpo_alpha 0.5",
    "ipo": f"{RAGGED} --loss_type ipo --cpo_alpha 0.0",
    "few": "--dataset_train_split validation --max_steps 2 --loss_type simpo --alpha 0.1",  # less than one batch
    "experts": f"--model_name_or_path MODEL:mixtral {RAGGED}",
}
ORPO = {"whole": f"{RAGGED} --gradient_accumulation_steps 2", "adapters": ADAPTERS}
TPO = {"whole": RAGGED, "adapters": ADAPTERS, "no-reference": f"{RAGGED} --tpo_alpha 0.0 --loss_type tpo-l"}


@pytest.mark.support("trl cpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "whole": "dp_shard=2 dp_shard=4 pp=2",
            "adapters": "dp_shard=2,tp=2 dp_replicate=2,pp=2",
            "ipo": "tp=2,pp=2",
            "few": "dp_shard=4",
            "experts": "dp_shard=2,ep=2",
        }
    ),
)
def test_cpo(trl_runs, case, spec):
    trl_runs.check("cpo", "preference", CPO[case], spec)


@pytest.mark.support("trl orpo")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"whole": "dp_shard=4 dp_shard=2,tp=2,zero_stage=1", "adapters": "dp_shard=2,pp=2"})
)
def test_orpo(trl_runs, case, spec):
    trl_runs.check("orpo", "preference", ORPO[case], spec)


@pytest.mark.support("trl tpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"whole": "dp_shard=4 dp_shard=2,pp=2", "adapters": "dp_replicate=2,tp=2 cp=2", "no-reference": "pp=2"}),
)
def test_tpo(trl_runs, case, spec):
    trl_runs.check("tpo", "triple", TPO[case], spec)


TEACHER = (
    "--teacher MODEL:wide --max_new_tokens 8 --max_steps 4 "
    "--dataset_train_split test --eval_strategy steps --eval_steps 2 "
)
GKD = {
    # Completions of the model, of the teacher, or those of the data set, as one number per batch decides.
    "mixed": f"{TEACHER} --lmbda 0.6 --seq_kd true --beta 0.0",
    "positions": f"{TEACHER} --model_name_or_path MODEL:gpt2 --lmbda 0.6",
    "adapters": f"{TEACHER} {LORA} --lmbda 1.0 --beta 1.0 --gradient_accumulation_steps 2 --temperature 0.7",
}


@pytest.mark.support("trl gkd")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "mixed": "dp_shard=4 dp_shard=2,tp=2,zero_stage=2 dp_replicate=2,pp=2",
            "adapters": "dp_shard=2,pp=2 cp=2",
            "positions": "dp_shard=2",
        }
    ),
)
def test_gkd(trl_runs, case, spec):
    trl_runs.check("gkd", "chat", GKD[case], spec)


DRAWN = {
    "gkd": ("chat", f"{TEACHER} --lmbda 1.0 --eval_strategy no"),
    "online_dpo": ("prompt", "--max_new_tokens 8 --max_steps 4"),
}


@pytest.mark.parametrize(("name", "spec"), pairs({"gkd": "tp=2 pp=2", "online_dpo": "tp=2"}))
def test_real_draws(trl_runs, name, spec):
    """The ranks of one model draw what one process draws, step after step."""
    asked = (name, *DRAWN[name])
    how = (partial(trl_scripts.script, real_draws=True),)
    (expected,) = trl_runs.run(1, *asked, how=how)
    for outcome in trl_runs.run(2, *asked, spec, how=how):
        for ours, theirs in zip(outcome.logs[:-1], expected.logs[:-1], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)  # as in test_trl_generating.py


STEPS = f"--teacher MODEL:wide --max_completion_length 8 --max_steps 4 --max_length 64 {EVALUATED}"
GOLD = {
    # Each part of a step is drawn or not: data ranks must cut it as one process does.
    "mixed": f"{STEPS} --gradient_accumulation_steps 2 --lmbda 0.5",
    "adapters": f"{STEPS} {LORA} --gradient_accumulation_steps 2 --lmbda 0.5 --num_generations 2 --beta 0.0",
    # Two tokenizers: a mean over examples, and one over tokens.
    "texts": f"{STEPS} --gradient_accumulation_steps 2 --lmbda 0.0 --use_uld_loss true --uld_crossentropy_weight 0.5",
}


@pytest.mark.support("trl gold")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"mixed": "dp_shard=2 pp=2", "adapters": "dp_shard=4 dp_shard=2,tp=2", "texts": "dp_shard=2 tp=2,pp=2"}),
)
def test_gold(trl_runs, case, spec):
    trl_runs.check("gold", "chat", GOLD[case], spec)


IW_OPD = {
    "weighted": f"{STEPS} --gradient_accumulation_steps 2 --lmbda 1.0",
    "divergence": f"{STEPS} {LORA} --gradient_accumulation_steps 2 --lmbda 0.5 --num_generations 2 "
    "--distillation_objective jsd --loss_top_k 1 --reverse_kl_top_1_mode argmax",
}


@pytest.mark.support("trl iw_opd")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"weighted": "dp_shard=4,tp=2 dp_shard=2,pp=2", "divergence": "dp_shard=2 tp=2"})
)
def test_iw_opd(trl_runs, case, spec):
    trl_runs.check("iw_opd", "chat", IW_OPD[case], spec)


GENERATED = '--num_generations 2 --max_completion_length 8 --max_steps 4 --generation_kwargs {"use_cache":true} '
GMPO = {
    "reference": f"{GENERATED} --beta 0.1 --sync_ref_model true --ref_model_sync_steps 2 --num_generations 8 "
    "--gradient_accumulation_steps 2 --steps_per_generation 4 --num_iterations 2",
    # GMPO's loss is a mean over rows, whatever this says.
    "evaluated": f"{GENERATED} --loss_type bnpo --beta 0.1 --eval_strategy steps --eval_steps 2",
    "adapters": f"{GENERATED} {LORA} --top_entropy_quantile 0.5",
}


@pytest.mark.support("trl gmpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"reference": "dp_shard=2,tp=2 pp=2", "evaluated": "dp_shard=2 dp_shard=2,pp=2", "adapters": "dp_shard=2"}),
)
def test_gmpo(trl_runs, case, spec):
    trl_runs.check("gmpo", "prompt", GMPO[case], spec)


OWN = f"--max_completion_length 8 --max_steps 4 --num_generations 2 --num_generations_eval 8 {EVALUATED}"
TWICE = "--gradient_accumulation_steps 2 --steps_per_generation 4 --num_iterations 2"
SDFT = {
    # The teacher follows the model; without tokens in a row, which some data rank has alone.
    "whole": f"{OWN} --teacher_model_kind ema --teacher_sync_steps 2 --num_loss_tokens_to_skip 3 "
    "--distillation_mode full_logits",
    "adapters": f"{OWN} {LORA} {TWICE} --teacher_model_kind ema --distillation_mode sampled_token "
    "--distillation_alpha 1.0",
    "itself": f"{OWN} --teacher_model_kind live --generate_from_teacher true --gradient_accumulation_steps 2",
}


@pytest.mark.support("trl sdft")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"whole": "dp_shard=4 dp_shard=2,pp=2", "adapters": "dp_shard=2,tp=2 pp=2", "itself": "dp_replicate=2"}),
)
def test_sdft(trl_runs, case, spec):
    trl_runs.check("sdft", "context", SDFT[case], spec)


SDPO = {
    "rewards": f"{OWN} --distillation_weight 0.0 --loss_type grpo --scale_rewards batch",
    # A rank may have no answer to learn from; policies have a mean over tokens.
    "few": f"{OWN} --distillation_weight 0.3 --loss_type bnpo --mask_truncated_completions true "
    "--success_reward_threshold 6.5",
    "adapters": f"{OWN} {LORA} {TWICE} --distillation_weight 0.5 --include_environment_feedback true "
    "--num_generations 8",
}


@pytest.mark.support("trl sdpo")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"rewards": "dp_shard=2,pp=2", "few": "dp_shard=4 pp=2", "adapters": "dp_shard=2,tp=2"})
)
def test_sdpo(trl_runs, case, spec):
    trl_runs.check("sdpo", "context", SDPO[case], spec)


ANSWERS = "--max_new_tokens 8 --max_steps 4 --max_length 96"
ONLINE_DPO = {
    "whole": f"{ANSWERS} --gradient_accumulation_steps 2",
    "adapters": f"{ANSWERS} {LORA} --loss_type ipo --reward_model MODEL:scores --missing_eos_penalty 1.0",
    "ragged": f"{ANSWERS} --dataset_train_split test",  # one data rank
    "positions": f"{ANSWERS} --max_length 20 --model_name_or_path MODEL:gpt2",
}


@pytest.mark.support("trl online_dpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "whole": "dp_shard=2 dp_shard=4",
            "adapters": "dp_shard=2,tp=2,zero_stage=1 dp_replicate=2",
            "ragged": "tp=2",
            "positions": "dp_shard=2",
        }
    ),
)
def test_online_dpo(trl_runs, case, spec):
    trl_runs.check("online_dpo", "prompt", ONLINE_DPO[case], spec)


@pytest.mark.parametrize(
    ("name", "spec", "flags", "asked", "works"),
    [
        ("cpo", "cp=2", "", "CPOTrainer with cp_size=2", "tp_size=2 works"),
        ("orpo", "cp=2", "", "ORPOTrainer with cp_size=2", "tp_size=2 works"),
        ("cpo", "tp=2", "--generate_during_eval true", "CPOTrainer with generate_during_eval=True", "=False works"),
        (
            "gold",
            "pp=2",
            f"{STEPS} --use_uld_loss true --uld_use_hybrid_loss true",
            "hybrid_loss=True",
            "=False works",
        ),
        (
            "sdft",
            "dp_shard=2",
            f"{OWN} --num_generations_eval 2",
            "26 answers in batches of 8",
            "drop_last=True works",
        ),
        ("online_dpo", "pp=2", ANSWERS, "OnlineDPOTrainer with pp_size=2", "tp_size=2 works"),
        (
            "online_dpo",
            "dp_shard=2",
            ONLINE_DPO["ragged"],
            "13 answers in batches of 8",
            "dataloader_drop_last=True works",
        ),
        ("gold", "dp_shard=2,batch_shares=3:1", STEPS, "GOLDTrainer with batch_shares=", "batch_shares=even works"),
    ],
)
def test_what_cannot_hold_is_refused(trl_runs, monkeypatch, name, spec, flags, asked, works):
    if "generate" in flags:  # TRL asks for one of two packages first
        monkeypatch.setattr(f"trl.experimental.{name}.{name}_trainer.is_wandb_available", lambda: True)
    with pytest.raises(RankFailure) as failure:
        trl_runs.parallel(
            name, {"gold": "chat", "online_dpo": "prompt", "sdft": "context"}.get(name, "preference"), flags, spec
        )
    assert asked in failure.value.message
    assert works in failure.value.message
