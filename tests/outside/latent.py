"""Methods that call a model in their own ways: several passes per step, heads, memories, vectors of other adapters."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "latent.py")


def latent(method: str, model: str = "llama", more: str = "") -> Case:
    """A case of one method on a small model."""
    words = f"--method {method} --model ROOT/{model} --output_dir OUT --sources SOURCES --batch_size ROWS {more}"
    return Case(SCRIPT, words)


LATENT = {
    "Medusa": latent("medusa"),
    "Medusa, accumulated": latent("medusa", more="--accumulation 2"),
    "Coconut": latent("coconut"),
    "Coconut, GPT-2": latent("coconut", "gpt2"),
    "recurrent memory": latent("memory"),
    "AutoCompressors": latent("compressors"),
    "AutoCompressors, accumulated": latent("compressors", more="--accumulation 2"),
    "LoRRA": latent("representations"),
    "O-LoRA": latent("orthogonal"),
    "O-LoRA, accumulated": latent("orthogonal", more="--accumulation 2"),
    "SimCSE": latent("sentences", "bert"),
    "SimCSE, full batches": latent("sentences", "bert", "--full"),
}
