"""`trl sft` and the command that docs/trl.md gives in its place: the same flags, the same numbers, the same folder."""

import json
import sys

import pytest

from tests.distributed import run_alone
from tests.reliability.launching import hf_parallel_launch, launch
from tests.training import none, weight_differences

pytest.importorskip("trl")

from tests import trl_scripts

STEPS = 3


def flags(root, out, rows: int) -> list[str]:
    """Of both commands; `rows` are those of a data rank."""
    words = {
        **{"model_name_or_path": root / "model", "dataset_name": root / "data" / "completion", "output_dir": out},
        **{"max_steps": STEPS, "logging_steps": 1, "save_steps": STEPS, "report_to": "none", "use_cpu": "true"},
        **{"bf16": "false", "optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": rows},
    }
    return [word for key, value in words.items() for word in (f"--{key}", str(value))]


def losses(out) -> list[float]:
    """What Trainer has logged up to its checkpoint."""
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def test_the_flags_of_trl_sft_under_a_layout(tmp_path):
    run_alone(trl_scripts.write_model, str(tmp_path / "model"))
    run_alone(trl_scripts.write_data, str(tmp_path / "data"))
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    plain = launch([sys.executable, "-m", "trl.cli.main", "sft"], *flags(tmp_path, alone, 8), timeout=400)
    assert plain.code == 0, plain.err[-2000:]
    command = [*hf_parallel_launch(2, "dp_shard=2"), "-m", "trl.scripts.sft"]
    done = launch(command, *flags(tmp_path, spread, 4), timeout=400)
    assert done.code == 0, done.err[-2000:]
    assert len(losses(alone)) == STEPS
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    none(weight_differences(str(spread), str(alone), 1e-5))
