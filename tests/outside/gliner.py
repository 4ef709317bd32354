"""GLiNER's own training of its models, from a checkout: Trainer with its own steps, saves and a sum for a loss."""

import json
from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "name_spans.py")
RUN = "--model ROOT/bert --data ROOT/spans.jsonl --output_dir OUT --batch_size ROWS"


def with_settings(more: str = "", **settings: object) -> Case:
    """A case with arguments of training; JSON without spaces, because arguments are split at them."""
    given = json.dumps(settings, separators=(",", ":"))
    return Case(SCRIPT, f"{RUN} --settings {given} {more}", needs=("gliner",))


GLINER = {
    "GLiNER": with_settings(),
    "GLiNER, times processes": with_settings("--count_processes", dataloader_drop_last=True),
    "GLiNER, times processes, accumulated": with_settings(
        "--count_processes", dataloader_drop_last=True, gradient_accumulation_steps=2
    ),
    "GLiNER, drawn": with_settings('--drawn --config {"max_neg_type_ratio":1}'),
    "GLiNER, mean": with_settings(loss_reduction="mean"),
    "GLiNER, accumulated": with_settings(gradient_accumulation_steps=2),
    "GLiNER, one rate": with_settings(others_lr=None),
    "GLiNER, saved": with_settings("--checkpoint"),
    "GLiNER, tokens": with_settings('--config {"span_mode":"token_level"}'),
    "GLiNER, no rnn": with_settings('--config {"num_rnn_layers":0}'),
}
EXTRACTORS = str(Path(__file__).parent / "scripts" / "extractors.py")
#: Its loader knows no processes: all read batches of 8.
ALL = "--folder ROOT/bert --data_file ROOT/spans.jsonl --output_dir OUT --batch_size 8"
GLINER |= {
    f"GLiNER2{more}": Case(EXTRACTORS, f"{ALL} {words}", needs=("gliner2",))
    for more, words in {"": "", ", LoRA": "--lora"}.items()
}
