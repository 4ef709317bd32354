"""`hf-parallel prove` finds each planted error, and names the module; a clean run shows no difference."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from transformers import trainer

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli.prove import Proof, Script
from hf_parallel.prove.locate import describe_returned_gradients
from tests import distributed  # noqa: F401 - one thread, everything imported: processes are forked from here
from tests.prove.faults import FAULTS
from tests.training import axes

SCRIPT = Path(__file__).parent / "script.py"
ARGUMENTS = [
    *("--output_dir=out", "--learning_rate=0.01", "--per_device_train_batch_size=4", "--adam_epsilon=1e-3"),
    *("--gradient_accumulation_steps=2", "--eval_strategy=epoch"),
]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """A proof per layout, whose references run once."""
    made = {}

    def proof_of(spec: str) -> Proof:
        if spec not in made:
            config = ParallelConfig.parse(spec).resolve(axes(spec)["world"])
            made[spec] = Proof(tmp_path_factory.mktemp("proof"), config, Script(str(SCRIPT), ARGUMENTS), limit_s=200)
        return made[spec]

    return proof_of


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2", "cp=2", "dp_replicate=2"])
def test_clean(proofs, spec):
    """No false alarm."""
    with redirect_stderr(io.StringIO()):
        ranks = proofs(spec).run_layout()
        verdict = proofs(spec).judge(ranks)
    assert verdict.compared.differences == [], verdict.told(spec, 0)
    assert {"loss", "gradient norm", "gradient", "weight", "saved weight", "example"} <= verdict.compared.counts.keys()
    steps = zip(*(record.steps for record in (*ranks, *proofs(spec).references())), strict=True)
    said = [describe_returned_gradients(list(own), alone, disturbed) for *own, alone, disturbed in steps]
    assert set(said) == {"; the gradients of all modules' outputs agree"}, said


def _begin_anew(rank: int) -> None:
    """Read the epoch from its first example on after a resumption."""
    trainer.skip_first_batches = lambda loader, num_batches=0: loader


def _forget_moments(rank: int) -> None:
    """Leave the optimizer's states in the checkpoint."""
    trainer.Trainer._load_optimizer_and_scheduler = lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("plant", "differs"),
    [(None, False), (_begin_anew, True), (_forget_moments, True)],
    ids=["right", "data", "moments"],
)
def test_resumed_by_another_layout(plant, differs, tmp_path):
    """A run that dp_shard=2 saves in the middle of an epoch and tp=2 resumes has one process's numbers."""
    config, saved_by = (ParallelConfig.parse(spec).resolve(2) for spec in ("tp=2", "dp_shard=2"))
    proof = Proof(tmp_path, config, Script(str(SCRIPT), ARGUMENTS), limit_s=200, saved_by=saved_by)
    with redirect_stderr(io.StringIO()):
        verdict = proof.judge(proof.run_layout(plant))
    told = verdict.told("tp=2", 0)
    assert bool(verdict.compared.differences) == differs, told
    if differs:
        assert min(one.step for one in verdict.compared.differences if one.step) == 3, told
        assert "the first layout trained as one process" in told
    else:
        assert verdict.compared.counts["gradient"] == 2 * 4 * 30  # ranks, steps, parameters
        assert verdict.compared.counts["loss"] == 2 * 4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_found(proofs, fault):
    """Something differs; the module is the one at fault, where a module is."""
    with redirect_stderr(io.StringIO()):
        verdict = proofs(fault.spec).judge(proofs(fault.spec).run_layout(fault.plant))
    told = verdict.told(fault.spec, 0)
    kinds = {one.kind for one in verdict.compared.differences}
    assert kinds, told
    assert not fault.kinds or kinds & set(fault.kinds), told
    if fault.where:
        assert verdict.place is not None, told
        assert verdict.place.module == fault.where, told
    if fault.batch:
        assert f"the first in batch {fault.batch} of 2" in told, told
