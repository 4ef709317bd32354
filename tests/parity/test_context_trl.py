"""TRL's own scripts, unchanged, over cp ranks: packs, joined rows, pairs of answers, references and adapters."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests.trl_scripts import LORA, PREFERENCE, RAGGED, SFT

RING, ULYSSES = "cp=2,context_parallel=ring", "cp=2,context_parallel=ulysses"
#: Script, data, flags, layouts. Packs and joined rows tell of their documents by positions that start again.
CASES = {
    "packing": ("sft", *SFT["packing"], (RING, ULYSSES, "cp=2,dp_shard=2", "cp=2,tp=2", "cp=2,pp=2")),
    "joined": ("sft", *SFT["joined"], (RING, ULYSSES)),
    "chat": ("sft", *SFT["chat"], (RING,)),
    "sft-adapters": ("sft", *SFT["adapters"], (RING, ULYSSES)),
    "dpo-reference": ("dpo", "preference", PREFERENCE["reference"], ("cp=2",)),
    "dpo-adapters": ("dpo", "preference", PREFERENCE["adapters"], ("cp=2", ULYSSES)),
    "dpo-precomputed": ("dpo", "preference", PREFERENCE["precomputed"], ("cp=2",)),
    "dpo-ragged": ("dpo", "preference", PREFERENCE["ragged"], ("cp=2",)),
    "kto-adapters": ("kto", "preference", PREFERENCE["adapters"], ("cp=2",)),
    "reward": ("reward", "preference", LORA + " --lora_task_type SEQ_CLS " + RAGGED, ("cp=2",)),
}


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        pytest.param(case, spec, marks=pytest.mark.support(f"{name} of TRL"))
        for case, (name, *_, specs) in CASES.items()
        for spec in specs
    ],
)
def test_same_as_one_process(trl_runs, case, spec):
    name, data, flags, _ = CASES[case]
    trl_runs.check(name, data, flags, spec)


def test_base_in_4_bits(trl_runs, request):
    """As over other ranks: TRL trains bf16 adapters on such a base, and losses round at other places."""
    if not request.config.getoption("--all"):
        pytest.skip("pytest --all: test_qlora.py has a base in 4 bits")
    pytest.importorskip("bitsandbytes")
    trl_runs.check("sft", "text", SFT["packing"][1] + " " + LORA + " --load_in_4bit", "cp=2", False, 1e-2, 1e-2)
