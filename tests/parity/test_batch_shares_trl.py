"""`batch_shares` in TRL's scripts as installed: losses, gradients and TRL's own metrics of one process."""

from functools import partial

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests import trl_scripts
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.training import pairs
from tests.trl_scripts import PREFERENCE, REWARD, SFT

TWO = "dp_shard=2,batch_shares=3:1"
PRODUCT = "pp=2,dp_shard=2,batch_shares=3:1"


@pytest.mark.parametrize(
    ("case", "spec"),
    pairs({"text": TWO, "completion": PRODUCT, "packing": TWO, "ragged": TWO, "joined": TWO, "dft": TWO}),
)
def test_sft(trl_runs, case, spec):
    trl_runs.check("sft", *SFT[case], spec)


@pytest.mark.parametrize(
    ("case", "spec"), pairs({"reference": f"{TWO} {PRODUCT}", "precomputed": TWO, "ragged": TWO, "few": TWO})
)
def test_dpo(trl_runs, case, spec):
    trl_runs.check("dpo", "preference", PREFERENCE[case], spec)


@pytest.mark.parametrize(("case", "spec"), pairs({"reference": TWO, "ragged": TWO}))
def test_kto(trl_runs, case, spec):
    trl_runs.check("kto", "preference", PREFERENCE[case], spec)


@pytest.mark.parametrize(("case", "spec"), pairs({"whole": f"{TWO} {PRODUCT}", "ragged": TWO}))
def test_reward(trl_runs, case, spec):
    trl_runs.check("reward", "preference", REWARD[case], spec)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trainers_that_generate(trl_runs, kind):
    call = partial(trl_scripts.generating, kind, trl_runs.model("llama"), trl_runs.out(), TWO, {})
    with pytest.raises(
        RankFailure, match=pattern_of_refusal("batch_shares=3:1", f"{kind}Trainer", works="batch_shares=even")
    ):
        run(call, 2, init=False)
