"""`trl sft`, `trl dpo`, `trl reward` and `trl kto` as installed, with their own flags, on every layout.

Five steps each: loss, gradient norm, TRL's own metrics, the set of gradients and the saved folder are those of one
process.
"""

import pytest

from tests.training import key_differences, none, pairs, weight_differences

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests import trl_scripts

LORA = "--use_peft --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --learning_rate 1.0"
RAGGED = "--dataset_train_split test --max_steps 4 --eval_strategy steps --eval_steps 3"
SFT = {
    "text": ("text", ""),
    "completion": ("completion", ""),  # completion-only by default
    "adapters": ("completion", LORA),
    "chat": ("chat", "--assistant_only_loss true"),
    "packing": ("text", "--packing true --max_length 32"),
    "ragged": ("completion", RAGGED),
    "joined": ("text", RAGGED + " --padding_free true --max_length None"),
    "dft": ("text", "--loss_type dft --gradient_accumulation_steps 2 --max_steps 3"),
}
SYNCED = "--sync_ref_model true --ref_model_sync_steps 2"  # the reference follows the model
PREFERENCE = {
    "reference": SYNCED,
    "adapters": LORA,
    "precomputed": "--precompute_ref_log_probs true",
    "ragged": RAGGED,
    "few": "--dataset_train_split validation --max_steps 2",  # less than one batch
}
REWARD = {"whole": "", "adapters": LORA + " --lora_task_type SEQ_CLS", "ragged": RAGGED}
#: Of what depends on time, or on how wide a batch is padded.
NOT_COMPARED = ("runtime", "per_second", "total_flos", "step_time")
#: Margins of a model that is its reference still are zero but for what fp32 rounds in sums of size 100 (1e-7 here,
#: while those of a step that was trained are 1e-4 and more): their signs, whose mean an accuracy is, are chance.
ROUNDED = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_scripts.Folder(tmp_path_factory.mktemp("trl"))


def tied(key, *logs):
    """Is it an accuracy of margins that rounding alone keeps from zero? Those that are exactly zero are compared."""
    margins = [log.get(key.replace("accuracies", "margins"), 0.0) for log in logs]
    return key.endswith("rewards/accuracies") and 0 < max(map(abs, margins)) <= ROUNDED


def check(folder, name, data, flags, spec, metrics=True, tolerance=1e-4, weights=2e-5, also=""):
    """Fail with every difference from one process in words; `also` are flags that the ranks alone are given."""
    reference, ranks = folder.reference(name, data, flags), folder.parallel(name, data, f"{flags} {also}", spec)
    found = []
    for rank, outcome in enumerate(ranks):
        assert len(outcome.logs) == len(reference.logs)
        for step, (ours, theirs) in enumerate(zip(outcome.logs, reference.logs, strict=True), 1):
            names = [key for key in theirs if not any(part in key for part in NOT_COMPARED)]
            if not metrics:
                names = [key for key in names if key in ("loss", "grad_norm", "eval_loss")]
            for key in (key for key in names if not tied(key, ours, theirs)):
                if not (gap := abs(ours[key] - theirs[key])) <= tolerance * max(1, abs(theirs[key])):
                    found.append(
                        f"rank {rank}: {key} in log {step}: {ours[key]}, one process {theirs[key]} ({gap:.1e})"
                    )
    found += key_differences([outcome.gradient_keys for outcome in ranks], reference.gradient_keys)
    # Five steps of SGD at a rate of 0.1 or 1 carry on what fp32 rounds in the losses: 1e-5 of gradients of size 1.
    none(found + weight_differences(ranks[0].folder, reference.folder, weights))


BOTH = "dp_shard=2,tp=2 tp=2,pp=2"


@pytest.mark.support("trl sft")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "text": "tp=2",
            "completion": "pp=2",
            "adapters": BOTH,
            "chat": "dp_shard=2",
            "packing": "dp_shard=2 pp=2",
            "dft": "dp_shard=2",
            "ragged": "dp_shard=2",
            "joined": "dp_shard=2",
        }
    ),
)
def test_sft(folder, case, spec):
    data, flags = SFT[case]
    check(folder, "sft", data, flags, spec)


@pytest.mark.support("trl dpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "reference": "dp_shard=2,tp=2 pp=2",
            "adapters": BOTH,
            "precomputed": "dp_shard=2,tp=2 pp=2",
            "ragged": "dp_shard=2",
            "few": "tp=2",
        }
    ),
)
def test_dpo(folder, case, spec):
    check(folder, "dpo", "preference", PREFERENCE[case], spec)


@pytest.mark.support("trl kto")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"reference": "dp_shard=2 pp=2", "adapters": "tp=2,pp=2", "ragged": "dp_shard=2"})
)
def test_kto(folder, case, spec):
    check(folder, "kto", "preference", PREFERENCE[case], spec)


@pytest.mark.support("trl reward")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"whole": "pp=2", "adapters": "dp_shard=2,tp=2", "ragged": "dp_shard=2"})
)
def test_reward(folder, case, spec):
    check(folder, "reward", "preference", REWARD[case], spec)


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2"])
def test_base_in_4_bits(folder, spec):
    """TRL trains bf16 adapters on such a base: losses round at other places."""
    pytest.importorskip("bitsandbytes")
    check(folder, "sft", "completion", LORA + " --load_in_4bit", spec, False, 1e-2, 1e-2)
