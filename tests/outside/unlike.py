"""Methods that change weights, gradients, layers or optimizers in ways of their own."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "unlike.py")


def unlike(method: str, model: str = "llama", more: str = "") -> Case:
    """A case of one method on a small model."""
    words = f"--method {method} --model ROOT/{model} --output_dir OUT --sources SOURCES --batch_size ROWS {more}"
    return Case(SCRIPT, words)


UNLIKE = {
    "PCGrad": unlike("projected_gradients", more="--full"),
    "PCGrad, even": unlike("projected_gradients", "evened", "--full"),
    "SAM": unlike("sharpness", more="--full"),
    "SAM, adaptive": unlike("sharpness_adaptive", more="--full"),
    "Wanda": unlike("wanda"),
    "Wanda's magnitudes": unlike("magnitude"),
    "SparseGPT": unlike("sparsegpt"),
    "soft prompt": unlike("soft_prompt"),
    "soft prompt, drawn": unlike("soft_prompt_drawn"),
    "SOAP": unlike("eigenbases"),
    "SOAP, merged": unlike("eigenbases_merged"),
    "Sophia": unlike("curvature"),
    "GradCache": unlike("cached_gradients", "bert", "--full"),
    "Contriever's MoCo": unlike("momentum", "bert", "--full"),
    "Mixout": unlike("mixout"),
    "Mixout, drawn": unlike("mixout_drawn"),
    "ShortGPT": unlike("shortened"),
    "ShortGPT, a known layer": unlike("shortened_by_one"),
    "LLaMA-Pro": unlike("expanded"),
    "torchao QAT": unlike("quantized"),
    "BitNet": unlike("ternary"),
}

LOOPS = str(Path(__file__).parent / "scripts" / "by_hand.py")


def by_hand(loop: str, model: str = "llama") -> Case:
    """A case of one loop; `SOURCES/packages` has ema_pytorch."""
    words = f"--loop {loop} --model ROOT/{model} --output_dir OUT --sources SOURCES --batch_size ROWS "
    return Case(LOOPS, f"{words} --packages SOURCES/packages")


UNLIKE |= {
    "direct-preference-optimization": by_hand("preferences"),
    "TextBrewer": by_hand("distilled", "bert"),
    "EasyEdit ROME": by_hand("edited"),
    "ema_pytorch": by_hand("averaged"),
    "ema_pytorch, rank 0 alone": by_hand("averaged_by_one"),
    "Flower's rounds": by_hand("federated"),
}
