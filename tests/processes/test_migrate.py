"""Arguments of FSDP and DeepSpeed are refused under a layout."""

import pytest

from hf_parallel.ask.spec import SpecError
from tests.distributed import run


def beside_a_layout() -> list[str]:
    """What TrainingArguments says under a layout; DeepSpeed is not installed, and is not asked for."""
    import transformers

    import hf_parallel  # noqa: F401

    said = []
    for given in ({"fsdp": True}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        with pytest.raises(SpecError) as refused:
            transformers.TrainingArguments("out", parallel="dp_shard=2", **given)
        said.append(str(refused.value))
    return said


def test_arguments_are_refused_under_a_layout():
    for said in run(beside_a_layout, 2, init=False):
        assert [line.partition(":")[0] for line in said] == ["fsdp=True", "deepspeed"]
        assert all("hf-parallel migrate --" in line for line in said)
