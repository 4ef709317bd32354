"""Liger on a CPU: its own kernels in Triton's interpreter, or stand-ins that do to a model what Liger does.

    with installed():       # where liger-kernel and triton are, in a forked process
    with stand_ins():       # anywhere

Stand-ins have Liger's names, arguments and places, and its writes into what it reads: rotated queries and the
gradients of an MLP's halves go where its inputs were, a norm's where its output's gradient was, and torch sees none.
"""

import contextlib
import importlib
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

used: Counter[str] = Counter()  # calls of stand-ins in this process
available = find_spec("liger_kernel") is not None and find_spec("triton") is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """In here what is installed runs on the CPU. For a process of its own: triton asks once how to run."""
    for name in [name for name in sys.modules if name.startswith("triton.") and not name.startswith("triton._C")]:
        del sys.modules[name]
    sys.modules.pop("triton", None)
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import triton.language as tl
    from liger_kernel.ops import geglu, layer_norm, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        """Compiled kernels get scalars as tensors; the interpreter does so with integers alone."""
        if type(argument) is not float:
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    # Functions of CUDA's own library have no body there.
    replaced = [(module, "rsqrt", lambda x: tl.rsqrt(x)) for module in (rms_norm, layer_norm)]
    replaced += [(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1), (interpreter, "_implicit_cvt", with_floats)]
    with contextlib.ExitStack() as stack:
        for module, name, function in replaced:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


# ---- stand-ins -----------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient, scale = gradient.contiguous(), torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        of_weight = (gradient * x * scale).flatten(0, -2).sum(0)
        along = (gradient * weight * x).mean(-1, keepdim=True)
        gradient.data.copy_(scale * (gradient * weight - along * scale.square() * x))
        return gradient, of_weight, None


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        of_gate = gradient * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
        of_up = gradient * gate * sigmoid
        gate.data.copy_(of_gate), up.data.copy_(of_up)
        return gate, up


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, cos, sin):
        ctx.save_for_backward(cos, sin)
        for tensor in (queries, keys):
            tensor.data.copy_(_rotated(tensor, cos, sin))
        return queries.view_as(queries), keys.view_as(keys)

    @staticmethod
    def backward(ctx, of_queries, of_keys):
        cos, sin = ctx.saved_tensors
        return _rotated(of_queries, cos, -sin), _rotated(of_keys, cos, -sin), None, None


def _rotated(tensor, cos, sin):
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    used["rope"] += 1
    return _Rotation.apply(q, k, cos, sin)


class LigerRMSNorm(nn.Module):
    def forward(self, hidden_states):
        used["norm"] += 1
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class LigerSwiGLUMLP(nn.Module):
    def forward(self, x):
        used["mlp"] += 1
        return self.down_proj(_SiLUMul.apply(self.gate_proj(x), self.up_proj(x)))


class LigerExperts(nn.Module):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("reads whole weights")


def lce_forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, skip_logits=None, **kwargs):
    items = kwargs.get("num_items_in_batch")
    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
    skip_logits = (self.training and labels is not None) if skip_logits is None else skip_logits
    if not skip_logits:
        logits, loss = self.lm_head(outputs[0]), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
    used["lce"] += 1
    logits, targets = F.linear(outputs[0], self.lm_head.weight)[:, :-1], labels[:, 1:]
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
    return CausalLMOutputWithPast(loss=loss if items is None else loss / items)


for _one in (liger_rotary_pos_emb, LigerRMSNorm.forward, LigerSwiGLUMLP.forward, LigerExperts.forward, lce_forward):
    _one.__module__ = "liger_kernel.transformers"  # by which its layers are told from a script's own


def _bind(module, function, name):
    module.__dict__["forward"] = function.__get__(module, type(module))
    module.__dict__["_get_name"] = lambda self: name


def apply(
    model, rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, **unknown
):
    """As Liger's function for Llama, Qwen 3 and Mixtral."""
    kind = model.config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    if rope:
        modeling.apply_rotary_pos_emb = liger_rotary_pos_emb
    if fused_linear_cross_entropy:
        model.forward = MethodType(lce_forward, model)
    base = getattr(model, model.base_model_prefix, model)
    norms = [base.norm] if rms_norm else []
    for layer in base.layers:
        if swiglu and hasattr(layer.mlp, "gate_proj"):
            _bind(layer.mlp, LigerSwiGLUMLP.forward, "LigerSwiGLUMLP")
        elif swiglu:
            _bind(layer.mlp.experts, LigerExperts.forward, "LigerExperts")
        if rms_norm:
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [
                getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)
            ]
    for norm in norms:
        norm.offset, norm.casting_mode, norm.in_place, norm.row_mode = 0.0, "llama", True, None
        norm.variance_epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6
        _bind(norm, LigerRMSNorm.forward, "LigerRMSNorm")


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """In here Liger is installed, as far as transformers sees."""
    import transformers.integrations.liger as integration

    package, inside = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    inside._apply_liger_kernel_to_instance = apply
    modules = {"liger_kernel": package, "liger_kernel.transformers": inside}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(integration, "is_liger_kernel_available", return_value=True),
    ):
        yield
