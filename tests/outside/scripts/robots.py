"""LeRobot's policies and its step of training, on episodes that are drawn: ACT and diffusion."""

import argparse
import contextlib
import importlib.util
import sys
import time
import types
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.outside.stand_ins import stand_for

CHUNK = 8
ABSENT = ("imageio", "cv2", "av", "gymnasium", "rerun", "wandb", "deepdiff", "jsonlines", "torchcodec", "serial")
#: Its list of all policies imports models that Transformers 5 cannot define.
LEROBOT = Path(importlib.util.find_spec("lerobot").origin).parent


def read_step():
    """Return the function that takes a step, from the text of its script."""
    text = (LEROBOT / "scripts" / "lerobot_train.py").read_text()
    start = text.index("def update_policy(")
    found = {"torch": torch, "time": time, "nullcontext": contextlib.nullcontext, "has_method": hasattr}
    text = "from __future__ import annotations\n" + text[start : text.index("\n@", start)]
    exec(compile(text, "update_policy", "exec"), found)  # its own text
    return found["update_policy"]


def draw(count: int, pads: bool, steps: int) -> list[dict]:
    """Episodes' windows: a picture, a state, actions, of which the last ones may be none."""
    generator, rows = torch.Generator().manual_seed(3), []
    for number in range(count):
        row = {
            "observation.state": torch.randn(steps, 5, generator=generator).squeeze(0),
            "observation.images.top": torch.rand(steps, 3, 32, 32, generator=generator).squeeze(0),
            "action": torch.randn(CHUNK, 5, generator=generator),
            "action_is_pad": torch.arange(CHUNK) >= (CHUNK - number % 3 if pads else CHUNK),
        }
        rows.append(row)
    return rows


def main():
    stand_for(*ABSENT, "pynput", "zmq")
    sys.modules["lerobot.policies"] = types.ModuleType("lerobot.policies")
    sys.modules["lerobot.policies"].__path__ = [str(LEROBOT / "policies")]
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    options = argparse.ArgumentParser()
    for name in ("kind", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--pads", action="store_true")
    args = options.parse_args()
    torch.manual_seed(1)
    features = {
        "input_features": {
            "observation.state": PolicyFeature(FeatureType.STATE, (5,)),
            "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (5,))},
        "normalization_mapping": dict.fromkeys(("VISUAL", "STATE", "ACTION"), NormalizationMode.IDENTITY),
        "device": "cpu",
    }
    if args.kind == "act":
        sizes = {"dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 3, "dropout": 0.0}
        sizes |= {"chunk_size": CHUNK, "n_action_steps": CHUNK, "use_vae": False, "pretrained_backbone_weights": None}
        policy, steps = ACTPolicy(ACTConfig(**features, **sizes)), 1
    else:
        sizes = {"horizon": CHUNK, "n_action_steps": 2, "down_dims": (32, 48), "n_groups": 4, "crop_shape": None}
        sizes |= {"pretrained_backbone_weights": None, "num_train_timesteps": 10}
        policy, steps = DiffusionPolicy(DiffusionConfig(**features, **sizes)), 2
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    loader = DataLoader(draw(24, args.pads, steps), batch_size=args.batch_size)
    policy, optimizer, loader, schedule = accelerator.prepare(policy, optimizer, loader, schedule)
    meters = {name: AverageMeter(name, ":.3f") for name in ("loss", "grad_norm", "lr", "update_s", "dataloading_s")}
    tracker = MetricsTracker(args.batch_size, 24, 1, meters, accelerator=accelerator)
    update_policy = read_step()
    for batch in loader:
        tracker, _ = update_policy(tracker, policy, batch, optimizer, 10.0, accelerator, schedule)
    accelerator.save_model(policy, f"{args.output_dir}/end")
    accelerator.log({"norm": tracker.grad_norm.avg, "lr": tracker.lr.avg})


main()
