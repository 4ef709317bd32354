"""Losses that compare each example of a batch with all others (CLIP, SigLIP, CLAP) over data ranks."""

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertModel,
    ClapConfig,
    ClapModel,
    CLIPConfig,
    CLIPModel,
    CLIPSegConfig,
    CLIPSegModel,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
    Trainer,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.loops import take_step
from tests.refusals import pattern_of_refusal
from tests.rows import IMAGE_SIZE, LENGTH, VOCABULARY, Images
from tests.training import Outcome, activate, check_numbers, fit, trainer_of

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.1}
VISION = {**TOWER, "image_size": IMAGE_SIZE, "patch_size": 4, "initializer_range": 0.1}
SOUND = {
    **{"spec_size": 32, "patch_size": 4, "patch_stride": [4, 4], "num_classes": 3, "depths": [1, 1]},
    **{"num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16, "hidden_size": 32, "num_mel_bins": 8},
    **{"window_size": 4, "enable_fusion": False, "drop_path_rate": 0.0, "attention_probs_dropout_prob": 0.0},
}


def clip() -> CLIPModel:
    return CLIPModel(CLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=24))


def siglip() -> SiglipModel:
    return SiglipModel(SiglipConfig(text_config={**TEXT, "projection_size": 32}, vision_config=VISION))


def siglip2() -> Siglip2Model:
    """Whose images are patches."""
    vision = {**TOWER, "patch_size": 4, "num_patches": 16}
    return Siglip2Model(Siglip2Config(text_config={**TEXT, "projection_size": 32}, vision_config=vision))


def clap() -> ClapModel:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": LENGTH + 2}
    text = {**TEXT, **still, "pad_token_id": 1}
    model = ClapModel(ClapConfig(text_config=text, audio_config=SOUND, projection_dim=24))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def clipseg() -> CLIPSegModel:
    return CLIPSegModel(
        CLIPSegConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=24)
    )


def dual() -> VisionTextDualEncoderModel:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    texts, images = BertModel(BertConfig(**TEXT, **still)), ViTModel(ViTConfig(**VISION, **still))
    config = VisionTextDualEncoderConfig.from_vision_text_configs(images.config, texts.config, projection_dim=24)
    return VisionTextDualEncoderModel(config, vision_model=images, text_model=texts)


MODELS = {"clip": clip, "siglip": siglip, "clap": clap, "dual": dual, "siglip2": siglip2, "clipseg": clipseg}


class Captioned(Images):
    """An image, or a sound, and the text beside it."""

    def __init__(self, size: int, seed: int, kind: str) -> None:
        super().__init__(size, seed)
        self.kind = kind
        self.sounds = torch.randn(size, 1, 32 * 4, 8, generator=self.generator) if kind == "clap" else None

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = {"input_ids": self.tokens[index], "attention_mask": torch.ones(LENGTH, dtype=torch.long)}
        if self.kind == "siglip2":
            patches = (
                self.images[index].unflatten(1, (4, 4)).unflatten(3, (4, 4)).permute(1, 3, 2, 4, 0).reshape(16, 48)
            )
            media = {"pixel_attention_mask": torch.ones(16, dtype=torch.long), "spatial_shapes": torch.tensor([4, 4])}
            return {**text, "pixel_values": patches, **media}
        if self.sounds is None:
            return {**text, "pixel_values": self.images[index]}
        return {**text, "input_features": self.sounds[index], "is_longer": torch.tensor([False])}


def collate(rows: list[dict]) -> dict:
    return {**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}, "return_loss": True}


class OwnLoss(Trainer):
    """A script that asks the model for its loss and adds to it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss


def train(spec: str | None, out: str, name: str, rows: int, own: bool = False) -> Outcome:
    """Steps of 8 pairs; of the last 3 or 6 two data ranks have 3 and 0, or 4 and 2."""
    data_ranks = activate(spec)
    torch.manual_seed(models.SEED)
    sets = {"train_dataset": Captioned(rows, 11, name), "eval_dataset": Captioned(13, 12, name)}
    settings = {"num_train_epochs": 2, "learning_rate": 0.01, "remove_unused_columns": False, "label_names": []}
    kind = OwnLoss if own else Trainer
    return fit(*trainer_of(MODELS[name](), out, data_ranks, settings, kind, data_collator=collate, **sets))


@pytest.mark.parametrize(
    ("name", "spec", "rows", "own"),
    [
        ("clip", "dp_shard=2", 19, False),
        ("siglip", "dp_shard=2", 19, False),
        ("clap", "dp_shard=2", 22, False),
        ("siglip", "dp_replicate=2", 22, True),
        ("clip", "dp_shard=2,tp=2", 22, False),
        ("dual", "dp_shard=2", 22, False),
        ("siglip2", "dp_shard=2", 19, False),
        ("siglip", "dp_replicate=2,dp_shard=2", 19, False),
        ("siglip", "dp_shard=2,batch_shares=3:1", 22, False),
        ("clip", "tp=2", 22, True),
    ],
)
def test_same_numbers_as_one_process(runs, name, spec, rows, own):
    for rank in runs.compare(train, spec, name, rows, own):
        assert len(rank.logs) == 6


def loop(spec: str | None) -> list[float]:
    """Losses of a loop without a Trainer, and what its outputs have of this rank's pairs."""
    activate(spec)
    torch.manual_seed(models.SEED)
    model, rows = siglip(), Captioned(16, 11, "siglip")
    accelerator = Accelerator(cpu=True)
    size = 8 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(rows, batch_size=size, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        outputs = model(**batch)
        assert outputs.logits_per_image.shape == (size, 8)
        assert len(outputs.text_embeds) == len(outputs.vision_model_output.pooler_output) == size
        losses += take_step(accelerator, model, optimizer, outputs.loss, most=1e9)
    return losses


def test_a_loop_of_its_own():
    check_numbers(run(loop, 2, "dp_shard=2", init=False), run_alone(loop, None), 1e-5)


def test_a_loss_whose_parts_are_not_known_is_refused(tmp_path):
    with pytest.raises(RankFailure, match=pattern_of_refusal("dp_shard_size=2", works="dp_shard_size=1 works")):
        run(train, 2, "dp_shard=2", str(tmp_path), "clipseg", 19, init=False)
