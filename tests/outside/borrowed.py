"""Subclasses of Trainer that are read from checkouts: unlearning, alignment that resists tuning, attacks."""

import json
from pathlib import Path

from tests.outside.cases import Case
from tests.outside.watching import Tolerance

SCRIPT = str(Path(__file__).parent / "scripts" / "borrowed_trainers.py")


def borrowed(project: str, kind: str, settings: dict | None = None, more: str = "", read=(), **training) -> Case:
    """A case of one method; JSON without spaces, because arguments are split at them.

    Args:
        read: arguments of training that the project has added to Trainer's.
    """
    given, trained, added = (json.dumps(v, separators=(",", ":")) for v in (settings or {}, training, dict(read)))
    return Case(
        SCRIPT,
        f"--project {project} --kind {kind} --model ROOT/llama --output_dir OUT --sources SOURCES --batch_size ROWS "
        f"--settings {given} --training {trained} --read {added} {more}",
        tolerance=Tolerance(losses=1e-4),  # some losses are differences of two, and next to zero
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
ATTACKED = {
    "Vaccine": ("vaccine.VaccineTrainer", {"rho": 0.1}),
    "Vaccine, noise": ("vaccine.RandomVaccineTrainer", {"rho": 1e-4}),
    "Vaccine, Fisher": ("vaccine.FITrainer", {"lamb": 0.1}, "--lora"),
    "Vaccine, KL to the first weights": ("vaccine.KLTrainer", {"lamb": 0.1}),
    "Booster": (
        "booster.BoosterAlignmentTrainer",
        {"guide_data_num": 1, "alpha": 0.1, "lamb": 0.5, "perturb_aware": "False"},
    ),
    "Booster, LoRA": (
        "booster.BoosterAlignmentTrainer",
        {"guide_data_num": 1, "alpha": 0.1, "lamb": 0.5, "perturb_aware": ""},
        "--lora",
    ),
    "Booster, Vlguard": ("booster.VlguardTrainer", {"guide_data_num": 1, "lamb": 0.5}),
    "Booster, Lisa": (
        "booster.ADMMTrainer",
        {"alignment_step": 2, "finetune_step": 1, "guide_data_num": 1, "rho": 0.1},
    ),
    "Booster, LDIFS": ("booster.LDIFSTrainer", {"rho": 0.01}, "--lora"),
    "Booster, RepNoise": ("booster.RepNoiseTrainer", {"lamb": 0.1, "rho": 0.1}, "--lora"),
}
for name, (kind, read, *more) in ATTACKED.items():
    BORROWED[name] = borrowed("attacks", kind, more="".join(more), read=read)
BORROWED["tofu finetune"] = borrowed("tofu", "CustomTrainer")
for loss in ("grad_ascent", "grad_diff", "KL", "idk"):
    settings = {"forget_loss": loss, "oracle_model": loss == "KL", "eval_cfg": None}
    BORROWED[f"tofu forget, {loss}"] = borrowed("tofu", "CustomTrainerForgetting", settings)
ASSISTANTS = {
    "sft": ("SFTTrainer", {"loss_function": "CrossEntropyLoss"}, {}),
    "sft, accumulated": ("SFTTrainer", {"loss_function": "CrossEntropyLoss"}, {"gradient_accumulation_steps": 2}),
    "rm": ("RMTrainer", {"loss_function": "RMLoss"}, {}),
    "rm, accumulated": ("RMTrainer", {"loss_function": "RMLoss"}, {"gradient_accumulation_steps": 2}),
}
ASSISTANTS |= {f"{name}, prepared": (f"Prepared{kind}", *more) for name, (kind, *more) in ASSISTANTS.items()}
ASSISTANTS["rm, prepared, full batches"] = (
    "PreparedRMTrainer",
    {"loss_function": "RMLoss"},
    {"dataloader_drop_last": True},
)
for name, (kind, settings, training) in ASSISTANTS.items():
    BORROWED[f"Open-Assistant trainer_{name}"] = borrowed("assistants", kind, settings, **training)
