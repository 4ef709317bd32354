"""What scripts do with gradients that a layout does not show them: hooks, penalties, parameters of their own, losses
that change from step to step. Each has the numbers of one process, or is refused in words.
"""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.distributed import RankFailure, run
from tests.rows import Rows
from tests.training import TRAIN_SEED, Recorder, Script, Tolerance, activate, differences, fit, none, train, trainer_of

ODD = {"num_hidden_layers": 3, "vocab_size": 515}


class ByTurns(Trainer):
    """A sum over targets in one step, a mean over everything in the next."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        odd = torch.is_grad_enabled() and self.state.global_step % 2
        loss = outputs.logits.float().pow(2).mean() if odd else outputs.loss
        return (loss, outputs) if return_outputs else loss


class NeitherByTurns(ByTurns):
    """A product with the number of rows, which is no way to cut a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if torch.is_grad_enabled() and self.state.global_step % 2:
            loss = loss * len(inputs["labels"]) ** 2
        return (loss, outputs) if return_outputs else loss


class GathersByTurns(Trainer):
    """Data ranks compute their loss in another way in unlike steps; each loss looks at the rows of all data ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, rank = model(**inputs), self.accelerator.process_index
        rows = self.accelerator.gather(torch.tensor([len(inputs["labels"])])).tolist()
        if len(set(rows)) > 1:
            raise ValueError(f"losses of other micro-batches have met: {rows}")
        other = torch.is_grad_enabled() and self.state.global_step == 2 + rank
        return outputs.logits.float().pow(2).mean() if other else outputs.loss


class Penalised(Trainer):
    """A pull of all weights to where they began (L2-SP)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not hasattr(self, "former"):
            self.former = {name: p.detach().clone() for name, p in model.named_parameters()}
        outputs = model(**inputs)
        loss = outputs.loss + sum((p - self.former[name]).pow(2).sum() for name, p in model.named_parameters())
        return (loss, outputs) if return_outputs else loss


class GradientPenalty(Trainer):
    """The squared gradient of the embeddings is a part of the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        outputs = model(inputs_embeds=embeds, labels=inputs["labels"])
        (gradient,) = torch.autograd.grad(outputs.loss, embeds, create_graph=True)
        return outputs.loss + gradient.pow(2).sum()


class Perturbed(Trainer):
    """A second pass where each example's embeddings are moved along their gradient (FGM, FreeLB)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, embed = inputs["labels"], model.get_input_embeddings()
        embeds = embed(inputs["input_ids"])
        outputs = model(inputs_embeds=embeds, labels=labels, num_items_in_batch=num_items_in_batch)
        if not torch.is_grad_enabled():
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        (gradient,) = torch.autograd.grad(outputs.loss, embeds, retain_graph=True)
        moved = embed(inputs["input_ids"]) + gradient / gradient.norm(dim=(1, 2), keepdim=True)
        other = model(inputs_embeds=moved, labels=labels, num_items_in_batch=num_items_in_batch)
        return outputs.loss + other.loss


class Virtual(Trainer):
    """Virtual adversarial training (Miyato et al., 2018): along a divergence's gradient by noise."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        embed, outputs = model.get_input_embeddings(), model(**inputs, num_items_in_batch=num_items_in_batch)
        clean, embeds = outputs.logits.detach(), embed(inputs["input_ids"])
        noise = (embeds.detach().cos() / 10).requires_grad_()
        (gradient,) = torch.autograd.grad(self.diverge(model(inputs_embeds=embeds.detach() + noise), clean), noise)
        moved = model(inputs_embeds=embeds + gradient / gradient.norm(dim=(1, 2), keepdim=True))
        return outputs.loss + self.diverge(moved, clean) / num_items_in_batch

    def diverge(self, outputs, clean):
        ours, theirs = (nn.functional.log_softmax(logits.float(), -1) for logits in (outputs.logits, clean))
        return nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)


class Critic(Trainer):
    """Trains a small module of its own by hand, beside the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        if not hasattr(self, "critic"):
            torch.manual_seed(1)
            self.critic = nn.Linear(ODD["vocab_size"], 1)
            self.steps = torch.optim.SGD(self.critic.parameters(), lr=0.01)
            self.critic, self.steps = self.begin(self.critic, self.steps)
        if torch.is_grad_enabled():
            (self.critic(outputs.logits.detach().float()) - 1).pow(2).mean().backward()
            self.share(self.critic)
            self.steps.step()
            self.steps.zero_grad()
            self.log({"critic": sum(float(p.detach().sum()) for p in self.critic.parameters())})
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def begin(self, *made):
        return made

    def share(self, module):
        pass


class PreparedCritic(Critic):
    def begin(self, *made):
        return self.accelerator.prepare(*made)


class AveragedCritic(Critic):
    def begin(self, *made):
        """Train something on one rank alone before: it is not compared with the critic."""
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            private = nn.Parameter(torch.ones(3))
            private.pow(2).sum().backward()
            torch.optim.SGD([private], lr=0.1).step()
        return made

    def share(self, module):
        if torch.distributed.is_initialized():
            for parameter in module.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()


class TwoCritics(AveragedCritic):
    """Trains another critic of the same shape, of which rank 1 takes the first step before the first one's."""

    def begin(self, *made):
        self.other = nn.Linear(ODD["vocab_size"], 1)
        self.others = torch.optim.SGD(self.other.parameters(), lr=0.01)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            self.train_other()
        return made

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        if not (torch.distributed.is_initialized() and torch.distributed.get_rank() == 1):
            self.train_other()
        return found

    def train_other(self):
        """By numbers that all ranks have, unlike those of the first one."""
        self.other(torch.ones(3, ODD["vocab_size"])).sum().backward()
        self.others.step()
        self.others.zero_grad()


class CriticRecorder(Recorder):
    """Keeps what became of the critic."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs, **kwargs)
        if "critic" in logs:
            self.logs.append({"loss": logs["critic"], "grad_norm": 1.0})


def train_critic(spec, out, folder, kind):
    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = Rows(24, TRAIN_SEED, even=True, length=33)
    return fit(*trainer_of(model, out, ranks, None, kind, CriticRecorder(), train_dataset=rows))


class Temperature(Trainer):
    """Trains a number that is in no model."""

    def create_optimizer(self, *args):
        self.temperature = nn.Parameter(torch.ones(()))
        super().create_optimizer(*args)
        self.optimizer.add_param_group({"params": [self.temperature], "lr": 0.5})
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float() / self.temperature
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def mask_gradient(model):
    weight = model.get_input_embeddings().weight
    weight.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) >= 500)[:, None])


def halve_gradients(model):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter):
    parameter.grad.mul_(0.5)


def attend_eagerly(model):
    model.set_attn_implementation("eager")  # the gradient of sdpa has none of its own


def parametrise(model):
    nn.utils.parametrize.register_parametrization(model.model.layers[1].mlp.down_proj, "weight", nn.Tanh())


def adapt_very_linears(model):
    found = [module for name, module in model.named_modules() if type(module) is nn.Linear and "layers" in name]
    torch.optim.AdamW([{"params": (module.weight for module in found)}])


class Halves(TrainerCallback):
    """What the refusal of hooks names: gradients are changed before the optimizer's step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.grad.mul_(0.5)
            elif "embed_tokens" in name:
                parameter.grad[:500] = 0


def script(spec, out, folder, kind=Trainer, change=None, callbacks=(), rows=22):
    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if change is not None:
        change(model)
    rows = Rows(rows, TRAIN_SEED, length=33)
    return fit(*trainer_of(model, out, ranks, None, kind, callbacks=callbacks, train_dataset=rows))


@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_shard=2", "tp=2,pp=2", "dp_shard=2"])
def test_a_loss_that_is_a_sum_and_a_mean_by_turns(runs, spec):
    """Micro-batches' losses are added, or averaged, as the step has it; once all were added: eight times too much."""
    runs.compare(script, spec, runs.initial("llama", **ODD), ByTurns)


@pytest.mark.parametrize("spec", ["pp=2,dp_replicate=2", "pp=2,dp_shard=2"])
def test_data_ranks_that_change_their_loss_in_unlike_steps(runs, spec):
    """What is new to one of them all try, whose losses wait for each other; without stages nothing is tried.

    The process group is the script's own, so that it takes what is gathered on the host on GPUs, too.
    """
    folder, plain = runs.initial("llama", **ODD), spec.removeprefix("pp=2,")
    folders = [str(runs.root / one.replace("=", "")) for one in (plain, spec)]
    reference = run(partial(script, plain, folders[0], folder, GathersByTurns, rows=40), 2)
    ranks = run(partial(script, spec, folders[1], folder, GathersByTurns, rows=40), 4)
    none(differences(ranks, reference[0], Tolerance()))


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2"])
def test_gradients_changed_before_the_step(runs, spec):
    """The way that the refusal of hooks names."""
    runs.compare(script, spec, runs.initial("llama", **ODD), Trainer, None, (Halves(),))


@pytest.mark.parametrize("spec", ["cp=2", "tp=2", "dp_shard=2", "tp=2,cp=2"])
@pytest.mark.parametrize("kind", [Perturbed, Virtual])
def test_gradients_of_embeddings(runs, spec, kind):
    """Every rank has them whole; a cp rank once had those of its tokens, cp times as large, and zero elsewhere."""
    runs.compare(script, spec, runs.initial("llama", **ODD), kind)


TRAINED_APART = "SGD trains 2 parameters that are in no parallel model.*accelerator.prepare.module, optimizer. works"
REFUSED = {
    "a mask on a gradient": ((Trainer, mask_gradient), "dp_shard=2", "a hook on the gradient of .*embed_tokens"),
    "a mask beside tp": ((Trainer, mask_gradient), "tp=2,dp_shard=2", "a hook on the gradient of .*embed_tokens"),
    "a mask per micro-batch": ((Trainer, mask_gradient), "pp=2", "a hook on the gradient of .*embed_tokens"),
    "a hook after the backward": ((Trainer, halve_gradients), "pp=2", "a hook on the gradient of .*norm"),
    "a parametrization": ((Trainer, parametrise), "dp_shard=2", "a parametrization of model.layers.1.mlp.down_proj"),
    "a parametrization under tp": (
        (Trainer, parametrise),
        "tp=2",
        "a parametrization of model.layers.1.mlp.down_proj",
    ),
    "a parametrization under pp": (
        (Trainer, parametrise),
        "pp=2",
        "a parametrization of model.layers.1.mlp.down_proj",
    ),
    "adapters that find no linear": (
        (Trainer, adapt_very_linears),
        "tp=2",
        "AdamW without parameters under tp_size=2.*isinstance.*tp_size=1 works",
    ),
    "all weights of a stage": ((Penalised,), "pp=2", "goes through model.named_parameters.*pp_size=1 works"),
    "a gradient's gradient": ((GradientPenalty, attend_eagerly), "dp_shard=2", "create_graph=True"),
    "a gradient's gradient of parts": ((GradientPenalty, attend_eagerly), "tp=2", "create_graph=True"),
    "a number of the script's own": ((Temperature,), "dp_shard=2", r"a parameter of \(\) in SGD"),
    "a loss that is neither": ((NeitherByTurns,), "pp=2", "neither a sum nor a mean"),
    "a step per micro-batch": ((Critic,), "pp=2", "SGD.step.. in the script's loss.* pp_size=1 works"),
    "a module trained apart": ((Critic,), "dp_shard=2", TRAINED_APART),
    "a module of replicas": ((Critic,), "dp_replicate=2", TRAINED_APART),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_on_other_numbers_is_refused(runs, case):
    """Once these were ignored in silence, or died in torch."""
    arguments, spec, told = REFUSED[case]
    with pytest.raises(RankFailure, match=told):
        runs.compare(script, spec, runs.initial("llama", **ODD), *arguments)


@pytest.mark.parametrize("spec", ["tp=2", "pp=2"])
def test_a_number_of_the_scripts_own_trains_where_all_see_the_same_rows(runs, spec):
    """On one data rank every rank computes its whole gradient."""
    runs.compare(script, spec, runs.initial("llama", **ODD), Temperature)


CRITICS = [("dp_shard=2", PreparedCritic), ("dp_replicate=2", AveragedCritic), ("dp_shard=2,tp=2", AveragedCritic)]
CRITICS.append(("dp_shard=2", TwoCritics))


@pytest.mark.parametrize(("spec", "kind"), [*CRITICS, ("tp=2", Critic)])
def test_a_module_trained_beside_the_model(runs, spec, kind):
    """It is that of one process: ranks of one model train it by the same rows, data ranks by their mean."""
    runs.compare(train_critic, spec, runs.initial("llama", **ODD), kind)


@pytest.mark.parametrize("model", ["opt", "bart"])
def test_layers_left_out_at_random(runs, model):
    """The first or the last layer is where sequences would be cut and joined: they stay whole."""
    initial = runs.initial(model, **({"layerdrop": 0.5} if model == "opt" else {"encoder_layerdrop": 0.5}))
    runs.compare(train_dropped, "tp=2", model, initial)


def train_dropped(spec, out, model, folder):
    return train(Script(model=model), folder, out, activate(spec))
