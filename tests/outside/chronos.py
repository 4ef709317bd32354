"""Chronos, whose series come from streams: its training of T5 from a checkout, and Chronos-2's own Trainer."""

import json
from pathlib import Path

from tests.outside.cases import Case

TRAIN = "chronos-forecasting/scripts/training/train.py"
SERIES = "['ROOT/series/train.jsonl','ROOT/series/other.jsonl']"
#: Numbers that are written into the script. Workers draw by their own numbers, and `tensorboard` is not here.
EDITS = (
    ('report_to=["tensorboard"],', 'report_to="none", adam_epsilon=1e-3, use_cpu=True, disable_tqdm=True,'),
    ("    app()\n", "    app(standalone_mode=False)\n"),  # which else ends with an exit code
    ("ddp_find_unused_parameters=False,", ""),
)
T5 = (
    f"{SERIES} --context-length 24 --prediction-length 8 --min-past 8 --max-steps 4 "
    "--save-steps 2 --log-steps 1 --per-device-train-batch-size ROWS --learning-rate 1e-2 --shuffle-buffer-length 7 "
    "--n-tokens 519 --no-tf32 --no-torch-compile --output-dir OUT --dataloader-num-workers 0 --seed 3"
)
PIPELINE = "--model ROOT/chronos-2 --data ROOT/series/train.jsonl --output_dir OUT --batch_size ROWS"


def fit(more: str = "", **settings: object) -> Case:
    """Return a case of Chronos-2's `fit`; JSON without spaces, because arguments are split at them."""
    given = json.dumps(settings, separators=(",", ":"))
    script = str(Path(__file__).parent / "scripts" / "forecast.py")
    return Case(script, f"{PIPELINE} --settings {given} {more}", needs=("chronos",))


CHRONOS = {
    "chronos T5, its own vocabulary": Case(
        TRAIN, f"{T5} --model-id ROOT/t5 --gradient-accumulation-steps 2".replace("519", "515"), edits=EDITS
    ),
    "chronos T5": Case(TRAIN, f"{T5} --model-id ROOT/t5 --gradient-accumulation-steps 1", edits=EDITS),
    "chronos T5, accumulated": Case(TRAIN, f"{T5} --model-id ROOT/t5 --gradient-accumulation-steps 2", edits=EDITS),
    "chronos T5, from scratch": Case(
        TRAIN, f"{T5} --model-id ROOT/t5 --random-init --gradient-accumulation-steps 1", edits=EDITS
    ),
    "chronos GPT-2": Case(
        TRAIN, f"{T5} --model-id ROOT/gpt2 --model-type causal --gradient-accumulation-steps 1", edits=EDITS
    ),
    "chronos-2": fit(),
    "chronos-2, draws by process": fit("--own_draws"),
    "chronos-2, accumulated": fit(gradient_accumulation_steps=2),
    "chronos-2, covariates": fit("--covariates"),
    "chronos-2, evaluated": fit("--evaluate"),
}
