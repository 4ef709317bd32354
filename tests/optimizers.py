"""Optimizers as other packages write them, by what their steps read."""

import torch
from torch import optim


class Lists(optim.Optimizer):
    """Lists of tensors at once if foreach is set, which it is by default."""

    def __init__(self, params, lr, foreach=True):
        super().__init__(params, {"lr": lr, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            torch.enable_grad()(closure)()
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in chosen]
            gradients = [p.grad for p in chosen]
            if group["foreach"]:
                torch._foreach_lerp_(means, gradients, 0.5)
                torch._foreach_add_(chosen, means, alpha=-group["lr"])
                continue
            for p, mean, gradient in zip(chosen, means, gradients, strict=True):
                p.add_(mean.lerp_(gradient, 0.5), alpha=-group["lr"])


class Plain(optim.Optimizer):
    """Moves each parameter by what `find_moves` returns, divided by the number of the group's step plus one."""

    def __init__(self, params, lr, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            group["count"] = group.get("count", 0) + 1
            for p, move in zip(chosen, self.find_moves(group, chosen), strict=True):
                p.add_(move, alpha=-group["lr"] / (1 + group["count"]))
        return loss

    def find_moves(self, group, chosen):
        """The move of each parameter."""
        return [p.grad.sign() for p in chosen]


class LikeCopies(Plain):
    """In-place kernels of lists that DTensors do not have."""

    def find_moves(self, group, chosen):
        moves = [self.state[p].setdefault("move", torch.zeros_like(p)) for p in chosen]
        torch._foreach_copy_(moves, [p.grad for p in chosen])
        torch._foreach_maximum_(moves, -0.5)
        return moves


class LikeLamb(Plain):
    """Norms of one parameter and its gradient."""

    def find_moves(self, group, chosen):
        for p in chosen:
            self.state[p]["ratio"] = (p.norm() + 0.1) / (p.grad.norm() + 1e-6)
        return [p.grad * self.state[p]["ratio"] for p in chosen]


class LikeApollo(Plain):
    """Moments in a small space, by a number that each parameter gets where the optimizer is made."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            for number, p in enumerate(p for p in group["params"] if p.requires_grad):
                self.state[p]["seed"] = number + 1

    def find_moves(self, group, chosen):
        return [self.project(p.grad, self.state[p]) for p in chosen]

    def project(self, gradient, state):
        """A gradient by what a few random rows see of it."""
        rows = gradient.reshape(len(gradient), -1)
        generator = torch.Generator().manual_seed(state["seed"])
        small = torch.randn(3, len(rows), generator=generator).to(rows.device) / len(rows) ** 0.5 @ rows
        mean = state.setdefault("small", torch.zeros_like(small)).lerp_(small, 0.5)
        return gradient * mean.norm() / (small.norm() + 1e-6)


class LikeGalore(Plain):
    """An object for each parameter, as GaLore has a projector."""

    def find_moves(self, group, chosen):
        for p in chosen:
            self.state[p].setdefault("projector", object())
        return super().find_moves(group, chosen)


class LikeProdigy(Plain):
    """A rate of all parameters together, by how far they are from where they began."""

    def find_moves(self, group, chosen):
        starts = [self.state[p].setdefault("start", p.clone()) for p in chosen]
        pairs = zip(chosen, starts, strict=True)
        way = sum(float(torch.dot(p.grad.flatten(), (start - p).flatten())) for p, start in pairs)
        group["rate"] = max(group.get("rate", 0.01), way)
        return [p.grad.sign() * min(group["rate"], 1.0) for p in chosen]


class CountsAmongStates(Plain):
    """A count of all steps beside the states of parameters, which each step reads."""

    def find_moves(self, group, chosen):
        self.state["all"] = self.state.get("all", 0) + 1
        return [p.grad / p.grad.norm() / self.state["all"] for p in chosen]


class ByPlace(Plain):
    """The place of a parameter in its group counts."""

    def find_moves(self, group, chosen):
        return [p.grad * 0.9**place for place, p in enumerate(chosen)]


class BeginsLate(Plain):
    """Norms from the twentieth step on."""

    def find_moves(self, group, chosen):
        return [p.grad if group["count"] < 20 else p.grad / p.grad.norm() for p in chosen]


class AtRightAngles(Plain):
    """What happens where no part of a gradient is along its weights, as AdamP does."""

    def find_moves(self, group, chosen):
        return [p.grad if float((p * p.grad).mean().abs()) > 1e-9 else p.grad - p.grad.mean() for p in chosen]


class Draws(Plain):
    """Random numbers."""

    def find_moves(self, group, chosen):
        return [p.grad + torch.randn_like(p) for p in chosen]


class KeptByTensor(Plain):
    """States in the group, by the tensor itself."""

    def find_moves(self, group, chosen):
        states = group.setdefault("own", {})
        return [states.setdefault(p, torch.zeros_like(p)).add_(p.grad) for p in chosen]


class ByPlaceApart(KeptByTensor):
    """States in the group, and the place of a parameter counts, as in GrokAdamW."""

    def find_moves(self, group, chosen):
        return [move * 0.9**place for place, move in enumerate(super().find_moves(group, chosen))]


class Around(Plain):
    """Another optimizer, whose step is the real one."""

    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, lr)
        self.base = optim.SGD(params, lr)

    def step(self, closure=None):
        return self.base.step(closure)


class NormalisedSGD(optim.SGD):
    """Gradients of unit norm, by the step of torch's SGD."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.div_(p.grad.norm() + 1e-3)
        super().step(closure)


class SignedSGD(optim.SGD):
    """Signs of gradients, by the step of torch's SGD, and smaller weights after it."""

    @torch.no_grad()
    def step(self, closure=None):
        chosen = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in chosen:
            p.grad.sign_()
        super().step(closure)
        for p in chosen:
            p.mul_(0.9)
