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
    "AutoCompressors, full batches": latent("compressors", more="--full"),
    "AutoCompressors, accumulated": latent("compressors", more="--accumulation 2"),
    "LoRRA": latent("representations"),
    "O-LoRA": latent("orthogonal"),
    "O-LoRA, accumulated": latent("orthogonal", more="--accumulation 2"),
    "SimCSE": latent("sentences", "bert"),
    "SimCSE, full batches": latent("sentences", "bert", "--full"),
}

GRAFTS = str(Path(__file__).parent / "scripts" / "grafts.py")
#: What Transformers 5 has under another name, or no more.
MASKED = (("emmental/modeling_bert_masked.py", (("self.init_weights()", "self.post_init()"),)),)
DELTA = (
    (
        "opendelta/delta_models/prefix.py",
        (
            (
                "from transformers.models.distilbert.modeling_distilbert import MultiHeadSelfAttention",
                "MultiHeadSelfAttention = type(None)",
            ),
        ),
    ),
)


def graft(method: str, model: str = "llama", modules=(), more: str = "") -> Case:
    """A case of layers that a project has replaced or decorated."""
    words = f"--method {method} --model ROOT/{model} --output_dir OUT --sources SOURCES --batch_size ROWS {more}"
    return Case(GRAFTS, words, modules=modules)


LATENT |= {
    "ReLoRA": graft("merged"),
    "ReLoRA, moments at random": graft("merged_at_random"),
    "movement pruning": graft("masked", "bert", MASKED),
    "movement pruning, thresholds": graft("thresholds", "bert", MASKED),
    "OpenDelta LoRA": graft("lora", modules=DELTA),
    "OpenDelta adapter": graft("adapter", modules=DELTA),
    "OpenDelta BitFit": graft("bitfit", modules=DELTA),
}
