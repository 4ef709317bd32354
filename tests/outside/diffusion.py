"""Training scripts of diffusers, read from a checkout: models that are no Transformers', and averages of weights."""

from tests.outside.cases import Case

EXAMPLES = "diffusers/examples"
#: Noise and time steps drawn for each picture, and a small network.
BY_PICTURE = "__import__('tests.outside.stand_ins').outside.stand_ins.drawn_by"
UNCONDITIONAL = (
    (
        "noise = torch.randn(clean_images.shape, dtype=weight_dtype, device=clean_images.device)",
        f"noise = torch.stack([{BY_PICTURE}(x, torch.randn, x.shape) for x in clean_images])",
    ),
    (
        "timesteps = torch.randint(\n                0, noise_scheduler.config.num_train_timesteps, (bsz,), "
        "device=clean_images.device\n            ).long()",
        f"timesteps = torch.stack([{BY_PICTURE}(x, torch.randint, 0, 1000, ()) for x in clean_images])",
    ),
    ("block_out_channels=(128, 128, 256, 256, 512, 512)", "norm_num_groups=4, block_out_channels=(8, 8)"),
    (
        '                "DownBlock2D",\n                "DownBlock2D",\n                "DownBlock2D",\n'
        '                "DownBlock2D",\n                "AttnDownBlock2D",\n                "DownBlock2D",\n',
        '"DownBlock2D", "AttnDownBlock2D",',
    ),
    (
        '                "UpBlock2D",\n                "AttnUpBlock2D",\n                "UpBlock2D",\n'
        '                "UpBlock2D",\n                "UpBlock2D",\n                "UpBlock2D",\n',
        '"AttnUpBlock2D", "UpBlock2D",',
    ),
    ('if args.logger == "tensorboard"', 'if args.logger == "tb"'),
    ('choices=["tensorboard", "wandb"]', 'choices=["none", "wandb"]'),
    ("log_with=args.logger", "log_with=None"),
    (
        "logging_dir = os.path.join(args.output_dir",
        "torch.manual_seed(1)\n    logging_dir = os.path.join(args.output_dir",
    ),
)
DIFFUSION = {
    f"diffusers train_unconditional.py{name}": Case(
        f"{EXAMPLES}/unconditional_image_generation/train_unconditional.py",
        "--dataset_name ROOT/media/classes-full --output_dir OUT --resolution 16 --train_batch_size ROWS --num_epochs "
        "1 --learning_rate 1e-3 --adam_epsilon 1e-3 --lr_warmup_steps 0 --logger none --eval_batch_size 2 "
        f"--ddpm_num_inference_steps 2 --checkpointing_steps 2 {more}",
        edits=UNCONDITIONAL,
    )
    for name, more in {"": "", ", averaged": "--use_ema"}.items()
}
