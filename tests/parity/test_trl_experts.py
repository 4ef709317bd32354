"""TRL's SFT of a mixture, with the loss that balances experts: its fused head computes one of its own."""

from pathlib import Path

import pytest

from tests.parity.test_trl import check
from tests.training import spec_id
from tests.trl_scripts import Folder, write_model

PACKED = "--packing true --max_length 33 --eval_strategy steps --eval_steps 5 --gradient_accumulation_steps 2"
SFT = "--max_length 33 --eval_strategy steps --eval_steps 5 --gradient_accumulation_steps 2"


class Mixtures(Folder):
    """One model of experts whose auxiliary loss counts half."""

    def _write_models(self) -> None:
        write_model(str(self.root / "mixtral"), "mixtral_balanced")

    def flags(self, name: str, data: str, flags: str) -> tuple[str, ...]:
        where = ("--model_name_or_path", str(self.root / "mixtral"), "--dataset_name", str(self.root / "data" / data))
        return (*where, *flags.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Mixtures(Path(tmp_path_factory.mktemp("trl")))


def layouts(*specs):
    """A case per spec."""
    return pytest.mark.parametrize("spec", [pytest.param(spec, id=spec_id(spec)) for spec in specs])


@layouts("dp_shard=2,ep=2", "pp=2", "dp_shard=2,ep=2,pp=2")
def test_sft(folder, spec):
    """The auxiliary loss, which is no mean over rows, is logged and counted as in one process."""
    check(folder, "sft", "completion", SFT, spec)


@layouts("pp=2", "dp_shard=2,ep=2", "tp=2,ep=2", "cp=2", "dp_shard=2,ep=2,pp=2", "tp=2,pp=2", "cp=2,pp=2")
def test_packed(folder, spec):
    """Packs are joined to one row, or kept in rows for a pipeline, whose padding counts in no auxiliary loss.

    The last batch of an epoch leaves a data rank without rows: no stage of it counts the one it takes part with.
    """
    check(folder, "sft", "text", PACKED, spec)
