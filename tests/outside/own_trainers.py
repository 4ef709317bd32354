"""Subclasses of Trainer from papers and tutorials: distillation, R-Drop, focal loss, contrastive, rates by layer, …"""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "own_trainers.py")
KINDS = "distillation rdrop focal weighted contrastive layerwise balanced l2sp selective"
MORE = ("distillation_of_classes", "rdrop_of_words")


def of_kind(kind: str, more: str = "") -> Case:
    """A case of one subclass on the small Llama."""
    return Case(SCRIPT, f"--kind {kind} --model ROOT/llama --output_dir OUT --batch_size ROWS {more}")


OWN_TRAINERS = {
    **{f"own trainer, {kind.replace('_', ' ')}": of_kind(kind) for kind in (*KINDS.split(), *MORE)},
    "own trainer, selective, accumulated": of_kind("selective", "--accumulation 2"),
    "own trainer, distillation, accumulated": of_kind("distillation", "--accumulation 2"),
}
