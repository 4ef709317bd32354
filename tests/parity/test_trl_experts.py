"""TRL's SFT of a mixture, with the loss that balances experts: its fused head computes one of its own."""

import pytest

from tests.training import spec_id

pytest.importorskip("trl")
pytest.importorskip("datasets")

#: Experts whose auxiliary loss counts half.
SFT = (
    "--model_name_or_path MODEL:mixtral --max_length 33 --eval_strategy steps --eval_steps 5 "
    "--gradient_accumulation_steps 2"
)
PACKED = SFT + " --packing true"


def layouts(*specs):
    """A case per spec."""
    return pytest.mark.parametrize("spec", [pytest.param(spec, id=spec_id(spec)) for spec in specs])


@layouts("dp_shard=2,ep=2", "pp=2", "dp_shard=2,ep=2,pp=2")
def test_sft(trl_runs, spec):
    """The auxiliary loss, which is no mean over rows, is logged and counted as in one process."""
    trl_runs.check("sft", "completion", SFT, spec)


@layouts("pp=2", "dp_shard=2,ep=2", "tp=2,ep=2", "cp=2", "dp_shard=2,ep=2,pp=2", "tp=2,pp=2", "cp=2,pp=2")
def test_packed(trl_runs, spec):
    """Packs are joined to one row, or kept in rows for a pipeline, whose padding counts in no auxiliary loss.

    The last batch of an epoch leaves a data rank without rows: no stage of it counts the one it takes part with.
    """
    trl_runs.check("sft", "text", PACKED, spec)
