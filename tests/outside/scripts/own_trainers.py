"""Subclasses of Trainer as papers' code and tutorials have them: losses, optimizers and loaders of their own."""

import argparse

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


def rows(size: int, seed: int, classes: bool) -> Dataset:
    """Rows of 17 or 33 tokens: with a class each, or with labels that are not counted alike."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(size):
        tokens = torch.randint(5, 500, (33 if classes else 17 + 16 * (number % 2),), generator=generator).tolist()
        labels = tokens[0] % 3 if classes else [-100] * (number % 5) + tokens[number % 5 :]
        found.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels})
    return Dataset.from_list(found)


def collate(features):
    """Pad; classes are one number per row."""
    longest, batch = max(len(f["input_ids"]) for f in features), {}
    for key, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        values = [f[key] for f in features]
        padded = [v + [filler] * (longest - len(v)) if isinstance(v, list) else v for v in values]
        batch[key] = torch.tensor(padded)
    return batch


class DistillationTrainer(Trainer):
    """KL divergence to a teacher, as Hugging Face's guide of distillation has it."""

    def __init__(self, *args, teacher_model=None, temperature=2.0, lambda_param=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model
        self.loss_function = nn.KLDivLoss(reduction="batchmean")
        self.teacher.to(self.model.device)
        self.teacher.eval()
        self.temperature, self.lambda_param = temperature, lambda_param

    def compute_loss(self, student, inputs, return_outputs=False, num_items_in_batch=None):
        student_output = student(**inputs)
        with torch.no_grad():
            teacher_output = self.teacher(**inputs)
        soft_teacher = F.softmax(teacher_output.logits / self.temperature, dim=-1)
        soft_student = F.log_softmax(student_output.logits / self.temperature, dim=-1)
        distillation_loss = self.loss_function(soft_student, soft_teacher) * (self.temperature**2)
        loss = (1.0 - self.lambda_param) * student_output.loss + self.lambda_param * distillation_loss
        return (loss, student_output) if return_outputs else loss


class RDropTrainer(Trainer):
    """Two passes and the divergence between them; without dropout the second one sees other tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first = model(**inputs)
        noised = {**inputs, "input_ids": inputs["input_ids"].roll(1, dims=1)}
        second = model(**noised)
        p, q = F.log_softmax(first.logits, dim=-1), F.log_softmax(second.logits, dim=-1)
        kl = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
        kl = (kl + F.kl_div(q, p, reduction="none", log_target=True).sum(-1)) / 2
        loss = (first.loss + second.loss) / 2 + 0.7 * kl.mean()
        return (loss, first) if return_outputs else loss


class FocalTrainer(Trainer):
    """Focal loss with weights of classes."""

    weights = torch.tensor([0.5, 1.0, 2.0])

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        ce = F.cross_entropy(outputs.logits, labels, weight=self.weights.to(outputs.logits.device), reduction="none")
        pt = torch.exp(-ce)
        loss = ((1 - pt) ** 2 * ce).mean()
        return (loss, outputs) if return_outputs else loss


class WeightedTrainer(Trainer):
    """Cross-entropy with weights of classes, which divides by the weights of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.get("labels")
        outputs = model(**inputs)
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]))
        loss = loss_fct(outputs.get("logits").view(-1, 3), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class ContrastiveTrainer(Trainer):
    """Pulls hidden states of one class together, over the pairs of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs, output_hidden_states=True)
        pooled = F.normalize(outputs.hidden_states[-1].mean(1), dim=-1)
        alike = (inputs["labels"][:, None] == inputs["labels"][None]).float()
        scores = pooled @ pooled.T
        loss = outputs.loss + 0.1 * (((scores - alike) ** 2).sum(1) / len(scores)).mean()
        return (loss, outputs) if return_outputs else loss


class LayerwiseTrainer(Trainer):
    """Rates that fall from the head to the embeddings, and a cosine schedule of its own."""

    def create_optimizer(self, *args, **kwargs):
        groups, depth = [], self.model.config.num_hidden_layers
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            layer = next((int(part) for part in name.split(".") if part.isdigit()), -1 if "embed" in name else depth)
            decay = 0.0 if parameter.ndim < 2 else 0.1
            groups.append({"params": [parameter], "lr": 1e-2 * 0.8 ** (depth - layer), "weight_decay": decay})
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=num_training_steps)
        return self.lr_scheduler


class BalancedTrainer(Trainer):
    """A loader of its own, whose sampler draws rare classes as often as others."""

    def get_train_dataloader(self):
        labels = torch.tensor(self.train_dataset["labels"])
        weights = 1.0 / torch.bincount(labels, minlength=3).float().clamp(min=1)[labels]
        generator = torch.Generator().manual_seed(5)
        sampler = torch.utils.data.WeightedRandomSampler(weights, len(labels), generator=generator)
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            drop_last=self.args.dataloader_drop_last,
        )
        return self.accelerator.prepare(loader)


class L2SPTrainer(Trainer):
    """A penalty on how far weights are from where they began, added to gradients before the step."""

    def training_step(self, *args, **kwargs):
        if not hasattr(self, "started"):
            self.started = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    p.grad.add_(p.detach() - self.started[name], alpha=0.1)
        return loss


class SelectiveTrainer(Trainer):
    """Only the half of a row's tokens with the largest losses counts, as Rho-1 and other selections do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        kept = losses >= losses.median(dim=1, keepdim=True).values
        kept = kept & (labels != -100)
        loss = (losses * kept).sum(1) / kept.sum(1)
        return (loss.mean(), outputs) if return_outputs else loss.mean()


KINDS = {
    "distillation": (DistillationTrainer, False),
    "distillation of classes": (DistillationTrainer, True),
    "rdrop": (RDropTrainer, True),
    "rdrop of words": (RDropTrainer, False),
    "focal": (FocalTrainer, True),
    "weighted": (WeightedTrainer, True),
    "contrastive": (ContrastiveTrainer, True),
    "layerwise": (LayerwiseTrainer, False),
    "balanced": (BalancedTrainer, True),
    "l2sp": (L2SPTrainer, False),
    "selective": (SelectiveTrainer, False),
}


def main():
    options = argparse.ArgumentParser()
    for name in ("kind", "model", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    args = options.parse_args()
    set_seed(1)
    trainer_class, classes = KINDS[args.kind.replace("_", " ")]
    config = AutoConfig.from_pretrained(args.model, num_labels=3, pad_token_id=0)
    kind = AutoModelForSequenceClassification if classes else AutoModelForCausalLM
    model, more = kind.from_pretrained(args.model, config=config), {}
    if trainer_class is DistillationTrainer:
        set_seed(2)
        more["teacher_model"] = kind.from_config(config)
    arguments = TrainingArguments(
        args.output_dir,
        max_steps=4,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        label_names=["labels"],
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=rows(30, 1, classes),
        eval_dataset=rows(11, 2, classes),
        data_collator=collate,
        **more,
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(args.output_dir)


main()
