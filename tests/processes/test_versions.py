"""Targets of patches are as known on this version of each library."""

import importlib.metadata
import importlib.util
import types

import pytest
import torch

from hf_parallel import ParallelConfig, SpecError
from hf_parallel.ask.session import of_session
from hf_parallel.hooks import patching
from hf_parallel.hooks.patches import list_patches
from hf_parallel.hooks.patching import apply_patches
from hf_parallel.hooks.trl import trainers as trl_trainers
from tests.distributed import run, run_alone
from tests.refusals import pattern_of_refusal
from tests.training import arguments_of


def test_every_target_is_as_it_is_known():
    """Of the installed libraries, optional ones too: nothing waits to be refused."""

    def body():
        for package in (*patching.OPTIONAL, "transformers"):
            if importlib.util.find_spec(package) is not None:
                for module in {patch.module for patch in list_patches() if patch.library == package}:
                    importlib.import_module(module)
        done = apply_patches(list_patches())
        placed = sum(not isinstance(owner, patching.AfterImport) for owner, _, _ in done)
        refusing = [name for owner, name, _ in done if getattr(getattr(owner, name), "__name__", "") == "refuse"]
        return placed, dict(of_session(patching.Unusable)), refusing

    [(placed, *refused)] = run(body, 1)
    assert (refused, placed > 70) == ([{}, []], True)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"])
def test_trl_heads_before_torch_2_13(monkeypatch, schedule, tmp_path):
    """TRL's trainers that never have whole logits are refused when they are made, by their name."""
    trl = pytest.importorskip("trl")

    def ask():
        arguments, config = (
            arguments_of(str(tmp_path), kind=trl.SFTConfig, bf16=False),
            f"pp=2,pipeline_schedule={schedule}",
        )
        monkeypatch.setattr(
            trl_trainers.runtime, "mesh", lambda: types.SimpleNamespace(config=ParallelConfig.parse(config))
        )
        monkeypatch.setattr(torch, "__version__", "2.12.0")
        asked, works = f"pipeline_schedule={schedule}", "pipeline_schedule=1f1b works"
        with pytest.raises(SpecError, match=pattern_of_refusal("SFTTrainer", asked, "2.13", "2.12.0", works=works)):
            trl_trainers.check_trl_trainer(object.__new__(trl.SFTTrainer), arguments, None)
        trl_trainers.check_trl_trainer(object.__new__(trl.RewardTrainer), arguments, None)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        trl_trainers.check_trl_trainer(object.__new__(trl.SFTTrainer), arguments, None)

    run_alone(ask)  # arguments leave a state behind that ranks would inherit
