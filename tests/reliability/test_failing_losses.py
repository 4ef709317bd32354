"""A script's own loss that fails on the last stage, which alone runs it: no stage waits for the others' time-out."""

import pytest
from transformers import AutoModelForCausalLM, Trainer

from tests.distributed import run
from tests.rows import Rows
from tests.training import activate, arguments_of, axes


class Failing(Trainer):
    """Reads a column that is not there: in the first step, or in a later one."""

    fails_at = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if self.state.global_step >= self.fails_at:
            inputs["rewards"]
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,tp=2"])
def test_all_stages_stop(spec, fails_at, runs, tmp_path):
    """With the error of the script, and where it was raised."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515, num_key_value_heads=1)

    def train():
        activate(spec)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = Failing(model, arguments_of(str(tmp_path), 1), train_dataset=Rows(16, 11, length=33))
        trainer.fails_at = fails_at
        with pytest.raises(KeyError, match="rewards") as failed:
            trainer.train()
        return str(failed.value.__cause__)

    causes = run(train, axes(spec)["world"], init=False, timeout=60)
    assert "compute_loss" in causes[0]
    assert "on rank" in causes[0]
