"""Models whose `__init__` makes parameters past the meta device, and computes weights from others: Wav2Vec2's kind."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    HubertConfig,
    HubertForSequenceClassification,
    PreTrainedConfig,
    Wav2Vec2Config,
    Wav2Vec2ForPreTraining,
    Wav2Vec2ForSequenceClassification,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperForConditionalGeneration,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from tests.distributed import run, run_alone
from tests.parity.test_new_heads import check
from tests.rows import CLASSES, VOCABULARY
from tests.training import GLOBAL_BATCH, activate, fit, trainer_of

SPEECH = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    **{"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 31, "initializer_range": 0.1},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0},
    **{"final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.3, "mask_time_length": 3, "num_labels": CLASSES},
}
XLNET = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": CLASSES},
    **{"dropout": 0.0, "summary_last_dropout": 0.0},
}
WHISPER = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 20},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_target_positions": 20, "pad_token_id": 1},
    **{"bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4, "suppress_tokens": None},
    **{"begin_suppress_tokens": None},
}
MODELS = {
    "wav2vec2": (Wav2Vec2ForSequenceClassification, Wav2Vec2Config(**SPEECH)),
    "no masks": (Wav2Vec2ForSequenceClassification, Wav2Vec2Config(**SPEECH, apply_spec_augment=False)),
    "hubert": (HubertForSequenceClassification, HubertConfig(**SPEECH)),
    "xlnet": (XLNetForSequenceClassification, XLNetConfig(**XLNET)),
}


class Sounds(Dataset):
    """Waves with a class each, or tokens with one."""

    def __init__(self, name: str, size: int = 22):
        generator = torch.Generator().manual_seed(5)
        waves = torch.randn(size, 601, generator=generator)
        tokens = torch.randint(5, VOCABULARY, (size, 17), generator=generator)
        self.rows = {"input_ids": tokens} if name == "xlnet" else {"input_values": waves}
        self.classes = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict:
        return {"labels": self.classes[index], **{key: value[index] for key, value in self.rows.items()}}


def saved(kind: type, config: PreTrainedConfig, folder: str) -> str:
    """Save a model drawn under a seed."""

    def save():
        torch.manual_seed(7)
        kind(config).save_pretrained(folder)

    run_alone(save)
    return folder


def train(spec, out, name, folder):
    ranks = activate(spec)
    model = MODELS[name][0].from_pretrained(folder)
    torch.manual_seed(3)
    settings = {"per_device_train_batch_size": GLOBAL_BATCH // ranks, "learning_rate": 0.01}
    options = {"train_dataset": Sounds(name)}
    return fit(*trainer_of(model, out, ranks, settings, **options), f"{out}/saved")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *(("no masks", spec) for spec in ("dp_shard=2", "dp_replicate=2")),
        *(("xlnet", spec) for spec in ("dp_shard=2", "dp_replicate=2")),
        *((name, "tp=2") for name in ("wav2vec2", "hubert")),
    ],
)
def test_loads_and_trains(name, spec, runs, tmp_path):
    """`torch.Tensor(n)` makes a parameter on the host in a context of the meta device; SpecAugment draws its masks by
    NumPy, alike on all tp ranks, and data ranks would draw for their rows."""
    runs.compare(train, spec, name, saved(*MODELS[name], str(tmp_path)))


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2"])
def test_new_weights_after_computed_ones(spec, tmp_path):
    """`_init_weights` draws for a convolution's weight, which weight_norm computes anew; heads are drawn after it."""
    folder = saved(Wav2Vec2Model, Wav2Vec2Config(**SPEECH), str(tmp_path))
    check(spec, folder, Wav2Vec2ForPreTraining)


def test_weights_that_init_freezes_train_after_loading(tmp_path):
    """Transformers gives a model weights that train, also in the place of those that `__init__` froze."""
    folder = saved(WhisperForConditionalGeneration, WhisperConfig(**WHISPER), str(tmp_path))

    def trained(spec):
        activate(spec)
        model = WhisperForConditionalGeneration.from_pretrained(folder)
        return sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    alone = run_alone(trained, None)
    assert "model.encoder.embed_positions.weight" in alone
    assert run(trained, 2, "dp_shard=2", init=False) == [alone, alone]
