"""What scripts of other projects import or download and this machine has not: metrics, decoders, operators.

Draws that depend on how many rows a process has (crops, masks, negatives) are made row by row here: a data rank with
half of a batch would draw others.
"""

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import io
import sys
import types
import unittest.mock
import wave
from pathlib import Path

import datasets
import huggingface_hub
import numpy
import torch
import transformers


def install() -> None:
    """Put all of them in place, in a process that ends with its script."""
    sys.modules["evaluate"] = evaluate_module()
    sys.modules.update(nltk_modules())
    datasets.load_dataset = loading(datasets.load_dataset)
    huggingface_hub.hf_hub_download = downloading(huggingface_hub.hf_hub_download)
    datasets.Audio.decode_example = decoded
    datasets.features.audio.Audio.decode_example = decoded
    speech_draws()
    if datasets.config.TORCHVISION_AVAILABLE:
        picture_operators()
    transformers.TrainingArguments.overwrite_output_dir = True  # scripts of 4.57 ask for it
    defaults = list(torch.optim.AdamW.__init__.__defaults__)
    assert defaults[2] == 1e-8, defaults
    defaults[2] = 1e-3  # as the Trainer scripts are told to: Adam divides the rounding of a gradient by its size
    torch.optim.AdamW.__init__.__defaults__ = tuple(defaults)


def stand_for(*names: str) -> None:
    """Let a script import libraries that are not here and that its loop does not use: all that they have is a mock."""

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            known = name in names or name.partition(".")[0] in names
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

        def create_module(self, spec):
            module = unittest.mock.MagicMock(name=spec.name)
            module.__path__, module.__spec__ = [], spec
            return module

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())


def edit_imports(edits: dict[str, tuple[tuple[str, str], ...]]) -> None:
    """Import modules as a script's authors wrote them, but for names that libraries have no more.

    Args:
        edits: The end of a file's path, and pairs of text and what replaces it.
    """
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, name):
        path = self.get_filename(name)
        pairs = [pair for end, pairs in edits.items() if path.endswith(end) for pair in pairs]
        if not pairs:
            return original(self, name)
        text = Path(path).read_text()
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"{path}: nothing to edit for {old!r}")
            text = text.replace(old, new)
        return compile(text, path, "exec")

    loader.get_code = get_code


def evaluate_module() -> types.ModuleType:
    """`evaluate`, whose metrics all tell the share of equal entries under the keys that scripts read."""
    module = types.ModuleType("evaluate")
    module.__spec__ = types.SimpleNamespace(name="evaluate", origin=None, submodule_search_locations=None)
    module.load = lambda name, *args, **kwargs: Metric(name)
    return module


def nltk_modules() -> dict[str, types.ModuleType]:
    """`nltk`, which cuts a text into sentences at full stops, and whose data files are all there; its BLEU."""
    names = ("nltk", "nltk.translate", "nltk.translate.bleu_score")
    nltk, translate, bleu_score = modules = [types.ModuleType(name) for name in names]
    for module in modules:
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace(name=module.__name__, origin=None, submodule_search_locations=None)
    nltk.data = types.SimpleNamespace(find=lambda name: name)
    nltk.sent_tokenize = lambda text: text.split(". ")
    nltk.translate, translate.bleu_score = translate, bleu_score
    bleu_score.SmoothingFunction = unittest.mock.MagicMock
    bleu_score.sentence_bleu = lambda references, found, **_: float(found in references)
    return dict(zip(names, modules, strict=True))


class Metric:
    """A metric that is fed batch by batch and computed once."""

    def __init__(self, name: str):
        self.name, self.predictions, self.references = name, [], []

    def add_batch(self, predictions, references, **kwargs):
        self.predictions += list(predictions)
        self.references += list(references)

    def add(self, prediction, reference, **kwargs):
        self.add_batch([prediction], [reference])

    def compute(self, predictions=None, references=None, **kwargs):
        if predictions is None:
            predictions, references = self.predictions, self.references
        equal = [numpy.mean(numpy.equal(plain(a), plain(b))) for a, b in zip(predictions, references, strict=True)]
        self.predictions, self.references = [], []
        share = float(numpy.mean(equal))
        if self.name == "seqeval":
            return {f"overall_{key}": share for key in ("precision", "recall", "f1", "accuracy")}
        if self.name == "mean_iou":
            each = {f"per_category_{key}": numpy.full(4, share) for key in ("iou", "accuracy")}
            return {"mean_iou": share, "mean_accuracy": share, "overall_accuracy": share, **each}
        if self.name in ("wer", "cer"):
            return share
        keys = {"squad": ("exact_match", "f1"), "rouge": ("rouge1", "rougeL"), "sacrebleu": ("score",)}
        return dict.fromkeys(keys.get(self.name, (self.name, "accuracy")), share)


def plain(value):
    """An entry as something that numpy compares."""
    if isinstance(value, (str, dict)):
        return str(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, dict)):
        return " ".join(map(str, value))
    return numpy.asarray(torch.as_tensor(value).cpu())


def loading(original):
    """`load_dataset` of a folder that `save_to_disk` has written."""

    def load_dataset(path, name=None, *args, split=None, trust_remote_code=None, **kwargs):
        if not Path(path, "dataset_dict.json").exists():
            return original(path, name, *args, split=split, **kwargs)
        found = datasets.load_from_disk(path)
        return found[split] if split else found

    return load_dataset


def downloading(original):
    """`hf_hub_download` of a file in a local folder."""

    def hf_hub_download(repo_id, filename, *args, **kwargs):
        local = Path(repo_id, filename)
        return str(local) if local.exists() else original(repo_id, filename, *args, **kwargs)

    return hf_hub_download


def decoded(self, value, token_per_repo_id=None):
    """A sound as scripts read it, without torchcodec."""
    with wave.open(io.BytesIO(value["bytes"])) as opened:
        sound = numpy.frombuffer(opened.readframes(opened.getnframes()), dtype=numpy.int16)
    return {"array": sound.astype(numpy.float32) / 32768, "sampling_rate": opened.getframerate(), "path": None}


def speech_draws() -> None:
    """Make wav2vec 2.0's masks and negatives row by row, from the length of the row and of what is masked."""
    from transformers.models.wav2vec2 import modeling_wav2vec2 as module

    masks, negatives = module._compute_mask_indices, module._sample_negative_indices

    def masks_by_row(shape, mask_prob, mask_length, attention_mask=None, min_masks=0):
        found = numpy.zeros(shape, dtype=bool)
        for row in range(shape[0]):
            length = shape[1] if attention_mask is None else int(attention_mask[row].sum())
            found[row, :length] = drawn_by([length], masks, (1, length), mask_prob, mask_length, None, min_masks)[0]
        return found

    def negatives_by_row(shape, num_negatives, mask_time_indices=None):
        rows = []
        for row, mask in enumerate(mask_time_indices):
            drawn = drawn_by([int(mask.sum())], negatives, (1, shape[1]), num_negatives, mask[None])[0]
            rows.append(drawn + row * shape[1])
        return numpy.stack(rows)

    module._compute_mask_indices, module._sample_negative_indices = masks_by_row, negatives_by_row


def picture_operators() -> None:
    """Read pictures without torchvision's compiled part, and draw by picture."""
    import torchvision
    from torchvision.transforms import Compose
    from torchvision.transforms.functional import pil_to_tensor

    def read_image(path, mode=None):
        from PIL import Image

        return pil_to_tensor(Image.open(path).convert("RGB"))

    torchvision.io.read_image = read_image
    torchvision.io.image.read_image = read_image
    original = Compose.__call__
    Compose.__call__ = lambda self, picture: drawn_by(picture, original, self, picture)
    with contextlib.suppress(ImportError):
        import albumentations

        augmented = albumentations.Compose.__call__

        def by_picture(self, *args, image, **kwargs):
            self.set_random_seed(seed_of(image))
            return augmented(self, *args, image=image, **kwargs)

        albumentations.Compose.__call__ = by_picture


def drawn_by(picture, function, *args):
    """What a function draws for a picture, whatever was drawn before it."""
    seed, state = seed_of(picture), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        numpy.random.seed(seed % (1 << 31))
        try:
            return function(*args)
        finally:
            numpy.random.set_state(state)


def seed_of(value) -> int:
    """A number that a picture, an array or a tensor always has."""
    data = numpy.ascontiguousarray(numpy.asarray(value)).tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
