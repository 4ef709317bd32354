"""Trainer(model_init=…): a new model for each training, as in one process."""

from transformers import AutoConfig, AutoModelForCausalLM

from tests.rows import Rows
from tests.training import TRAIN_SEED, Outcome, activate, check_numbers, over, trainer_of

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}
RATES = (0.1, 0.03)


def trained_anew(spec: str | None, out: str, folder: str) -> Outcome:
    """Two trainings at rates of their own, each with an evaluation; then one more training."""
    data_ranks = activate(spec)
    config = AutoConfig.from_pretrained(folder)
    sets = {"train_dataset": Rows(22, TRAIN_SEED, length=33), "eval_dataset": Rows(11, 12, length=33)}
    trainer, recorder = trainer_of(
        None, out, data_ranks, model_init=lambda: AutoModelForCausalLM.from_config(config), **sets
    )  # drawn anew under the script's seed
    losses = []
    for rate in RATES:
        trainer.args.learning_rate = rate
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    trainer.train()
    trainer.save_model(f"{out}/saved")
    return Outcome(recorder.logs, recorder.gradient_keys, f"{out}/saved", more=losses)


@over("model_init", "tp=2", "pp=2", "dp_shard=2")
def test_each_training_begins_anew(runs, spec):
    asked = (trained_anew, runs.initial("llama", **ODD))
    reference = runs.alone(*asked)
    assert len(reference.logs) == 3 * (len(RATES) + 1)
    assert reference.logs[0]["loss"] == reference.logs[3]["loss"] != reference.logs[4]["loss"]  # another rate
    ranks = runs.compare(asked[0], spec, asked[1])
    check_numbers([rank.more for rank in ranks], reference.more)
