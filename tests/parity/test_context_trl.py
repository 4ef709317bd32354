"""TRL's own scripts, unchanged, over cp ranks: packs, joined rows, pairs of answers, references and adapters."""

import pytest

from tests.training import spec_id

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests import trl_scripts
from tests.parity.test_trl import LORA, PREFERENCE, RAGGED, SFT, check


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_scripts.Folder(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("spec", ["cp=2,context_parallel=ring", "cp=2,context_parallel=ulysses"], ids=spec_id)
@pytest.mark.parametrize("case", ["packing", "joined", "chat", "adapters"])
def test_sft(folder, case, spec):
    """Packs and joined rows tell of their documents by positions that start again."""
    data, flags = SFT[case]
    check(folder, "sft", data, flags, spec)


@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=2,tp=2", "cp=2,pp=2"], ids=spec_id)
def test_packing_with_other_axes(folder, spec):
    data, flags = SFT["packing"]
    check(folder, "sft", data, flags, spec)


@pytest.mark.parametrize("case", ["reference", "adapters", "ragged", "precomputed"])
def test_dpo(folder, case):
    """A loss over whole answers, of the model and of what it started from."""
    check(folder, "dpo", "preference", PREFERENCE[case], "cp=2")


def test_other_losses(folder):
    check(folder, "kto", "preference", PREFERENCE["adapters"], "cp=2")
    check(folder, "reward", "preference", LORA + " --lora_task_type SEQ_CLS " + RAGGED, "cp=2")


def test_base_in_4_bits(folder):
    """As over other ranks: TRL trains bf16 adapters on such a base, and losses round at other places."""
    pytest.importorskip("bitsandbytes")
    check(folder, "sft", "text", SFT["packing"][1] + " " + LORA + " --load_in_4bit", "cp=2", False, 1e-2, 1e-2)
