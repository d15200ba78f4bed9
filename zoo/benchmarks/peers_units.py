"""The models cut by hand into units, which a hand-made pipeline groups to stages.

Models: what a careful user writes for `torch.distributed.pipelining`: modules from a tuple of tensors to a tuple of
tensors, with the U-Net's skip connections carried along from stage to stage. Ignores: where the cuts are best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peers_models import TOKENS, ModelCase
from torch import Tensor, nn

__all__ = ["Stage", "Unit", "units_of"]

State = tuple[Tensor, ...]
Conditions = Mapping[str, Tensor]


class Unit(nn.Module):
    """A function of a state, with the modules whose parameters it uses."""

    def __init__(self, run: Callable[[State, Conditions], State], *modules: nn.Module | None) -> None:
        super().__init__()
        self.run = run
        self.used = nn.ModuleList(module for module in modules if module is not None)

    def forward(self, state: State, conditions: Conditions) -> State:
        """The state behind the unit."""
        return self.run(state, conditions)


class Stage(nn.Module):
    """A run of units, from tensors to a tensor, or to a tuple of several.

    With `solid` everything that crosses its borders, gradients too, is contiguous and nobody's view: gloo refuses what
    a concatenation hands back, and zero-bubble schedules detach stage outputs in place.
    """

    def __init__(self, units: Sequence[Unit], *, solid: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.solid = solid

    def forward(self, *state: Tensor, **conditions: Tensor) -> Any:
        """Run the units."""
        if self.solid:
            state = tuple(_Solid.apply(value) if value.is_floating_point() else value for value in state)
        for unit in self.units:
            state = unit(state, conditions)
        if self.solid:
            state = tuple(value.clone() if _is_view(value) else value.contiguous() for value in state)
        return state[0] if len(state) == 1 else state


class _Solid(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _is_view(value: Tensor) -> bool:
    return bool(value._is_view())


def units_of(case: ModelCase) -> list[Unit]:
    """The model as units, in the order in which they run."""
    return list(_BY_MODEL[case.name](case.module))


def _through(*modules: nn.Module) -> Unit:
    """Modules one after the other."""

    def run(state: State, _: Conditions) -> State:
        (value,) = state
        for module in modules:
            value = module(value)
        return (value,)

    return Unit(run, *modules)


def _vit(model: Any) -> Iterator[Unit]:
    def embed(state: State, _: Conditions) -> State:
        patches = model_embed(state[0])
        first = token.expand(patches.shape[0], -1, -1)
        return (torch.cat([first, patches], dim=1) + positions,)

    def classify(state: State, _: Conditions) -> State:
        return (head(norm(state[0])[:, 0]),)

    model_embed, token, positions = model.patch_embed, model.cls_token, model.pos_embed
    norm, head = model.norm, model.head
    start = Unit(embed, model_embed)
    start.token, start.positions = token, positions
    yield start
    yield from (_through(block) for block in model.blocks)
    yield Unit(classify, norm, head)


def _resnet(model: Any) -> Iterator[Unit]:
    yield _through(model.conv1, model.bn1, model.act1, model.maxpool)
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        yield from (_through(block) for block in layer)
    yield _through(model.global_pool, model.fc)


def _llama(model: Any) -> Iterator[Unit]:
    with torch.no_grad():
        nothing = torch.zeros(1, TOKENS, model.config.hidden_size)
        angles = tuple(part.detach() for part in model.model.rotary_emb(nothing, torch.arange(TOKENS)[None]))

    def block_unit(block: nn.Module) -> Unit:
        def run(state: State, _: Conditions) -> State:
            return (block(state[0], attention_mask=None, position_embeddings=angles),)

        return Unit(run, block)

    yield _through(model.model.embed_tokens)
    yield from (block_unit(block) for block in model.model.layers)
    yield _through(model.model.norm, model.lm_head)


def _tiny(model: Any) -> Iterator[Unit]:
    yield from (_through(layer) for layer in model)


# -- the U-Net: the state is the time embedding and a stack of samples -------------------------------------------------
#
# On the way down the last sample of the stack is both the running one and a skip connection; from the middle on the
# running sample lies on top of the skips that are left.


def _unet(model: Any) -> Iterator[Unit]:
    yield _unet_start(model)
    for block in model.down_blocks:
        for resnet, attention in _layers(block):
            yield _down(resnet, attention)
        for sampler in block.downsamplers or ():
            yield _pushed(sampler)
    yield _middle(model.mid_block)
    for block in model.up_blocks:
        *layers, (resnet, attention) = _layers(block)
        yield from (_up(*layer, []) for layer in layers)
        yield _up(resnet, attention, list(block.upsamplers or ()), needs_time=block is not model.up_blocks[-1])
    yield _unet_end(model.conv_norm_out, model.conv_act, model.conv_out)


def _layers(block: Any) -> list[tuple[nn.Module, nn.Module | None]]:
    attentions = list(block.attentions) if getattr(block, "has_cross_attention", False) else [None] * len(block.resnets)
    return list(zip(block.resnets, attentions, strict=True))


def _unet_start(model: Any) -> Unit:
    frequencies, embedding = model.time_proj, model.time_embedding
    added_frequencies, added_embedding, first = model.add_time_proj, model.add_embedding, model.conv_in

    def run(state: State, _: Conditions) -> State:
        sample, timestep, text, sizes = state
        time = embedding(frequencies(timestep).to(sample.dtype))
        numbers = added_frequencies(sizes.flatten()).reshape(text.shape[0], -1)
        added = added_embedding(torch.cat([text, numbers], dim=-1).to(time.dtype))
        return (time + added, first(sample))

    return Unit(run, frequencies, embedding, added_frequencies, added_embedding, first)


def _attended(attention: nn.Module | None, sample: Tensor, conditions: Conditions) -> Tensor:
    return sample if attention is None else attention(sample, return_dict=False, **conditions)[0]


def _down(resnet: nn.Module, attention: nn.Module | None) -> Unit:
    def run(state: State, conditions: Conditions) -> State:
        time, *stack = state
        return (time, *stack, _attended(attention, resnet(stack[-1], time), conditions))

    return Unit(run, resnet, attention)


def _pushed(sampler: nn.Module) -> Unit:
    return Unit(lambda state, _: (*state, sampler(state[-1])), sampler)


def _middle(block: nn.Module) -> Unit:
    def run(state: State, conditions: Conditions) -> State:
        return (*state, block(state[-1], state[0], **conditions))

    return Unit(run, block)


def _up(resnet: nn.Module, attention: nn.Module | None, samplers: list[nn.Module], *, needs_time: bool = True) -> Unit:
    """`needs_time`: whether a later unit reads the time embedding; gradients that nobody makes cannot be sent."""

    def run(state: State, conditions: Conditions) -> State:
        time, *stack, skip, sample = state
        sample = _attended(attention, resnet(torch.cat([sample, skip], dim=1), time), conditions)
        for sampler in samplers:
            sample = sampler(sample)
        return (time, *stack, sample) if needs_time else (sample,)

    return Unit(run, resnet, attention, *samplers)


def _unet_end(norm: nn.Module, activation: nn.Module, last: nn.Module) -> Unit:
    return Unit(lambda state, _: (last(activation(norm(state[0]))),), norm, activation, last)


_BY_MODEL: Mapping[str, Callable[[Any], Iterator[Unit]]] = {
    "vit": _vit,
    "llama": _llama,
    "unet": _unet,
    "resnet": _resnet,
    "tiny": _tiny,
}
