"""The loops of Hugging Face's course, on small models: tags, masked words, translation, spans, weighted key tokens."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "course.py")


def chapter(name: str, model: str, more: str = "") -> Case:
    """A chapter's loop on one of the small models."""
    return Case(SCRIPT, f"--chapter {name} --model ROOT/{model} --output_dir OUT --batch_size ROWS {more}")


COURSE = {
    "course, token classification": chapter("tags", "bert"),
    "course, token classification, decoder": chapter("tags", "llama"),
    "course, masked language": chapter("masks", "bert"),
    "course, translation": chapter("translations", "t5"),
    "course, question answering": chapter("spans", "bert"),
    "course, key tokens": chapter("keys", "gpt2"),
    "course, key tokens, accumulated": chapter("keys", "llama", "--accumulation 2"),
}
