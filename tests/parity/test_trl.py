"""`trl sft`, `trl dpo`, `trl reward` and `trl kto` as installed, with their own flags, on every layout.

Five steps each: loss, gradient norm, TRL's own metrics, the set of gradients and the saved folder are those of one
process.
"""

import pytest

from tests.distributed import RankFailure
from tests.training import pairs

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests.refusals import pattern_of_refusal
from tests.trl_scripts import LORA, PREFERENCE, REWARD, SFT

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
def test_sft(trl_runs, case, spec):
    data, flags = SFT[case]
    trl_runs.check("sft", data, flags, spec)


@pytest.mark.parametrize("schedule", ["chimera", "pipedream_2bw"])
def test_a_schedule_that_does_not_take_the_loss_of_sft(trl_runs, schedule):
    """SFTTrainer computes its loss itself; the schedule that the line names is the one of `test_sft`."""
    with pytest.raises(RankFailure, match=f"pipeline_schedule={schedule}: .*; pipeline_schedule=1f1b works"):
        trl_runs.parallel("sft", *SFT["text"], f"pp=2,pipeline_schedule={schedule}")


@pytest.mark.parametrize("flags", ["--packing true --max_length 32", "--padding_free true --max_length None"])
def test_noise_of_joined_examples_is_refused_under_pp(trl_runs, flags):
    """It was larger by the root of how many examples are joined."""
    noisy = f"{flags} --neftune_noise_alpha 20"
    line = pattern_of_refusal("neftune_noise_alpha=20", works="neftune_noise_alpha=None works")
    with pytest.raises(RankFailure, match=line):
        trl_runs.parallel("sft", "text", noisy, "pp=2")
    trl_runs.check("sft", "text", noisy, "tp=2")


@pytest.mark.support("trl dpo")
@pytest.mark.parametrize(
    ("case", "spec"),
    pairs(
        {
            "reference": "dp_shard=2,tp=2 pp=2 dp_shard=2,pp=2",
            "adapters": BOTH,
            "precomputed": "dp_shard=2,tp=2 pp=2",
            "ragged": "dp_shard=2",
            "few": "tp=2",
        }
    ),
)
def test_dpo(trl_runs, case, spec):
    trl_runs.check("dpo", "preference", PREFERENCE[case], spec)


@pytest.mark.support("trl kto")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"reference": "dp_shard=2 pp=2", "adapters": "tp=2,pp=2", "ragged": "dp_shard=2"})
)
def test_kto(trl_runs, case, spec):
    trl_runs.check("kto", "preference", PREFERENCE[case], spec)


def test_kto_with_one_example_per_data_rank(trl_runs):
    """TRL wants two on each process, because one would be paired with its own completion."""
    size = "--per_device_train_batch_size"
    trl_runs.check("kto", "preference", f"{size} 2 --max_steps 3", "dp_shard=2", also=f"{size} 1")


@pytest.mark.support("trl reward")
@pytest.mark.parametrize(
    ("case", "spec"), pairs({"whole": "pp=2", "adapters": "dp_shard=2,tp=2", "ragged": "dp_shard=2"})
)
def test_reward(trl_runs, case, spec):
    trl_runs.check("reward", "preference", REWARD[case], spec)


WHOLE_BATCHES = {
    "dpo preference --loss_type sigmoid sft --loss_weights 1.0 0.5": r"loss_type=sft.*2 data.*loss_type=sigmoid works",
    "dpo preference --loss_type aot": "loss_type=aot: .*loss_type=sigmoid works",
    "sft completion --padding_free true --max_length None --neftune_noise_alpha 5": "neftune_noise_alpha=None works",
}


@pytest.mark.parametrize("words", WHOLE_BATCHES)
def test_what_takes_a_whole_batch_is_refused(trl_runs, words):
    with pytest.raises(RankFailure, match=WHOLE_BATCHES[words]):
        trl_runs.parallel(*words.split(" ", 2), "dp_shard=2")


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2"])
def test_base_in_4_bits(trl_runs, spec):
    """TRL trains bf16 adapters on such a base: losses round at other places."""
    pytest.importorskip("bitsandbytes")
    trl_runs.check("sft", "completion", LORA + " --load_in_4bit", spec, False, 1e-2, 1e-2)
