"""Subclasses of Trainer that are read from checkouts: unlearning, alignment that resists tuning, attacks."""

import json
from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "borrowed_trainers.py")


def borrowed(project: str, kind: str, settings: dict | None = None, **training: object) -> Case:
    """A case of one method; JSON without spaces, because arguments are split at them."""
    given, trained = (json.dumps(values, separators=(",", ":")) for values in (settings or {}, training))
    return Case(
        SCRIPT,
        f"--project {project} --kind {kind} --model ROOT/llama --output_dir OUT --sources SOURCES --batch_size ROWS "
        f"--settings {given} --training {trained}",
    )


STEERING = {"module_regex": r"model\.layers\.2", "trainable_params_regex": [r"model\.layers\.(0|1|2)\.mlp\..*"]}
KINDS = {
    "GradAscent": {},
    "GradDiff": {},
    "GradDiff, KL": {"retain_loss_type": "KL"},
    "NPO": {},
    "DPO": {},
    "SimNPO": {},
    "RMU": {**STEERING, "retain_loss_type": "EMBED_DIFF"},
    "UNDIAL": {},
    "CEU": {},
    "SatImp": {},
    "WGA": {},
    "PDU": {"primal_dual": True, "dual_update_upon": "epoch"},
    "PDU, by step": {"primal_dual": True, "dual_update_upon": "step"},
}
BORROWED = {
    f"open-unlearning {name}": borrowed("open-unlearning", name.split(",")[0], settings)
    for name, settings in KINDS.items()
}
BORROWED["open-unlearning NPO, accumulated"] = borrowed("open-unlearning", "NPO", gradient_accumulation_steps=2)
