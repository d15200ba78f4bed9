"""Gradient checkpointing: regions are captured, cut like anything else, and computed again in the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.regions import region_of
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.cost.op_profile import OpProfile, measure
from pfeife_accelerate.ir.program import InputKind

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
SEED = 11


class Net(nn.Module):
    """Blocks that are computed again where `again` says so."""

    def __init__(self, block: Callable[[], nn.Module], again: Callable[..., Any] | None, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(size))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.again is None else self.again(block, x)
        return x


def _block(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 6), nn.Tanh())


def _anew(block: Any, *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False)


def _reentrant(block: Any, *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=True)


def _capture(model: nn.Module, *args: Any, autocast: Any = None, **kwargs: Any) -> CapturedCall:
    torch.compiler.reset()
    return ModelCapture(model, CPU).call(args, kwargs, autocast)


class Kept:
    """What autograd keeps while the stages run: bytes of storages that are no parameter's."""

    def __init__(self, model: nn.Module) -> None:
        self._outside = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._found: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._outside:
            self._found[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor.detach())  # so that no other storage takes its place
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._found.values())


def _gradients(
    call: CapturedCall, model: nn.Module, cuts: tuple[int, ...] = (), autocast: Any = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """The stages one after the other: the results' sum of squares, gradients by name, and the bytes kept."""
    graph, kept = call.graph, Kept(model)
    generators = torch.get_rng_state()
    model.zero_grad()
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name in graph.result_names() if graph.node_of[name].meta["example_value"].requires_grad]
    staged = split(graph, cuts, names)
    values: dict[str, Any] = {}
    sizes = staged.sizes(call.bindings)
    arguments = {str(p.index): call.arguments[p.index] for p in graph.placeholders}
    source = {
        InputKind.STATE: states, InputKind.SIZE: sizes, InputKind.VALUE: values, InputKind.MODEL_INPUT: arguments,
    }  # fmt: skip
    precision = torch.autocast(*autocast) if autocast else torch.autocast("cpu", enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor), precision:
        for stage in staged.stages:
            given = [SEED if i.kind is InputKind.SEED else source[i.kind][i.name] for i in stage.inputs]
            values.update(zip(stage.outputs, stage.run(*given), strict=True))
    loss = sum(values[name].double().square().mean() for name in names)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert torch.equal(torch.get_rng_state(), generators), "the script's generator is as it was"
    return loss.detach(), found, kept.num_bytes


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    assert found
    for name, gradient in found.items():
        scale = wanted[name].abs().max().clamp(min=1e-12)
        assert (gradient - wanted[name]).abs().max() <= tolerance * scale, name


def _both(make: Callable[[bool], nn.Module], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(call, model) without and with checkpointing."""
    plain, again = make(False), make(True)
    again.load_state_dict(plain.state_dict())
    return (_capture(plain, *args, **kwargs), plain), (_capture(again, *args, **kwargs), again)


@pytest.mark.parametrize("again", [_anew, _reentrant])
def test_regions_are_inlined_and_marked(again: Any):
    call = _capture(Net(_block, again), torch.randn(5, 6))
    plain = _capture(Net(_block, None), torch.randn(5, 6))
    assert [node.target for node in call.graph.ops] == [node.target for node in plain.graph.ops]
    numbers = [region_of(node).number for node in call.graph.ops]  # type: ignore[union-attr]
    assert numbers == [i // 5 for i in range(20)]
    assert call.graph.cut_allowed == plain.graph.cut_allowed
    assert [call.graph.states_of(node) for node in call.graph.ops] == [
        plain.graph.states_of(node) for node in plain.graph.ops
    ]


@pytest.mark.parametrize("again", [_anew, _reentrant])
def test_what_is_inside_a_region_is_not_kept_and_the_gradient_is_exact(again: Any):
    x = torch.randn(64, 6)
    plain, repeated = _both(lambda on: Net(lambda: _block(0.3), again if on else None), x)
    loss, wanted, all_bytes = _gradients(*plain)
    for cuts in ((), (8,), (7, 13)):  # at a region's border, and within regions
        found_loss, found, few_bytes = _gradients(*repeated, cuts)
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)
        if not cuts:  # of each block its input alone is left, where two results of 24 and a mask were
            assert few_bytes <= 5 * 64 * 6 * 4
            assert few_bytes < all_bytes / 5


def test_autocast_holds_when_a_region_is_computed_again():
    autocast = ("cpu", torch.bfloat16)
    x = torch.randn(16, 6)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.a(x))
            with torch.autocast("cpu", enabled=False):
                y = torch.tanh(self.b(y.float()))
            with torch.no_grad():
                z = torch.tanh(y)
            return torch.tanh(self.a(y)) + z

    for block in (lambda: _block(0.3), Inside):
        plain, repeated = _both(lambda on, block=block: Net(block, _anew if on else None), x, autocast=autocast)
        loss, wanted, _ = _gradients(*plain, autocast=autocast)
        enabled = torch.is_autocast_enabled("cpu")
        found_loss, found, _ = _gradients(*repeated, autocast=autocast)
        assert torch.is_autocast_enabled("cpu") == enabled
        assert torch.is_grad_enabled()
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)


class InPlaceWithin(nn.Module):
    """Changes what it has made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.relu_()
        y[:, :3] += 1
        return torch.sin(y) * 2


class InPlaceOnInput(nn.Module):
    """Changes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.sin(self.a(x) + 1)


class Counter(nn.Module):
    """Changes a buffer, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.sin(self.a(x)) * 2


class ChangedAfter(nn.Module):
    """A region whose input is changed in place behind it."""

    def __init__(self, again: Any) -> None:
        super().__init__()
        self.a, self.b, self.again = nn.Linear(6, 6), nn.Linear(6, 6), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        inside = lambda x: torch.sin(self.b(x * 2))  # noqa: E731
        y = inside(x) if self.again is None else self.again(inside, x)
        x += y
        return x * 1


def test_changes_in_place_are_made_once_or_on_what_the_region_made():
    x = torch.randn(8, 6)
    for block in (InPlaceWithin, Counter, lambda: nn.Sequential(nn.Linear(6, 6), InPlaceOnInput())):
        plain, repeated = _both(lambda on, block=block: Net(block, _anew if on else None), x)
        loss, wanted, _ = _gradients(*plain)
        found_loss, found, _ = _gradients(*repeated)
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)
        assert all(buffer == 1 for buffer in repeated[1].buffers())


def test_running_statistics_are_updated_once_and_nothing_is_kept():
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 6))

    class Scaled(nn.Module):
        """What it gives depends on what it has counted before."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(self.a(x) * self.scale)
            self.scale.mul_(2)
            return torch.sin(y * self.scale)

    for make in (block, Scaled):
        plain, repeated = _both(lambda on, make=make: Net(make, _anew if on else None), torch.randn(64, 6))
        loss, wanted, all_bytes = _gradients(*plain)
        found_loss, found, few_bytes = _gradients(*repeated)
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)
        for (name, buffer), other in zip(plain[1].named_buffers(), repeated[1].buffers(), strict=True):
            assert torch.equal(buffer, other), name
        assert few_bytes < all_bytes / 2


def test_a_region_that_changes_its_input_is_not_computed_again():
    x = torch.randn(8, 6)

    class Outside(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.first, self.second, self.on = nn.Linear(6, 6), InPlaceOnInput(), on

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return _anew(self.second, y) if self.on else self.second(y)

    for model in (Outside, lambda on: ChangedAfter(_anew if on else None)):
        torch.manual_seed(0)
        plain, repeated = _both(model, x)
        loss, wanted, _ = _gradients(*plain)
        found_loss, found, _ = _gradients(*repeated)
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)


def test_a_region_inside_a_region_and_several_results():
    class Nested(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.on = _block(0.2), _block(0.2), on

        def inner(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.a(x)
            return y * factor, y.sum(-1, keepdim=True)

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            y, total = _anew(self.inner, x, 3.0) if self.on else self.inner(x, 3.0)
            return self.b(y) + total * x.shape[-1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _anew(self.outer, x) * 2 if self.on else self.outer(x) * 2

    plain, repeated = _both(Nested, torch.randn(8, 6))
    loss, wanted, _ = _gradients(*plain)
    numbers = {region_of(node) and region_of(node).number for node in repeated[0].graph.ops}  # type: ignore[union-attr]
    assert numbers == {0, None}
    for cut in [p for p, allowed in enumerate(repeated[0].graph.cut_allowed) if allowed]:
        found_loss, found, _ = _gradients(*repeated, (cut,))
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _selectively(block: Any, *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False, context_fn=_selective)


def test_what_a_model_chooses_to_keep_is_kept():
    x = torch.randn(64, 6)
    plain, repeated = _both(lambda on: Net(_block, _selectively if on else None), x)
    loss, wanted, _ = _gradients(*plain)
    assert region_of(repeated[0].graph.ops[0]).context_fn is _selective  # type: ignore[union-attr]
    found_loss, found, _ = _gradients(*repeated)
    assert torch.equal(found_loss, loss)
    _assert_equal(found, wanted, 0)


def test_the_costs_of_a_region_are_those_of_computing_it_again():
    x = torch.randn(64, 6)
    (plain, _), (repeated, _) = _both(lambda on: Net(lambda: _block(0.3), _anew if on else None), x)
    profiles: dict[str, OpProfile] = {}
    costs = [
        measure(measurable_ops(call.graph, call.bindings, CPU), CPU, profiles=profiles) for call in (plain, repeated)
    ]
    kept = [sum(cost.saved_bytes for cost in one) for one in costs]
    assert kept[1] == 3 * 64 * 6 * 4, "of each block its input; that of the first is the call's"
    assert kept[0] > 5 * kept[1]
    for before, after in zip(*costs, strict=True):
        assert after.forward_s == before.forward_s
        assert after.backward_s == pytest.approx(before.backward_s + before.forward_s)
        assert after.backward_weight_s == 0, "nothing of a region is put off"
    in_one_block = kept[0] / 4
    assert 0.7 * in_one_block < max(cost.workspace_bytes for cost in costs[1]) <= 1.3 * in_one_block


def test_a_logger_in_forward_does_not_break_the_graph():
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logging.getLogger("model").warning("rows: %d", x.shape[0])
            return self.a(x)

    assert len(_capture(Talking(), torch.randn(4, 6)).graph.ops) == 1


def test_a_value_made_in_forward_may_be_said_to_require_gradients():
    """transformers does so for reentrant checkpointing, where some input must require them: frozen embeddings, T5."""

    class Saying(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.on = nn.Linear(6, 6), nn.Linear(6, 6), on
            self.a.requires_grad_(False)
            if on:
                self.a.register_forward_hook(lambda module, given, result: result.requires_grad_(True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if self.on:
                y.requires_grad = True
                return _reentrant(self.b, self.a(y))
            return self.b(self.a(y))

    plain, repeated = _both(Saying, torch.randn(4, 6))
    loss, wanted, _ = _gradients(*plain)
    found_loss, found, _ = _gradients(*repeated)
    assert torch.equal(found_loss, loss)
    _assert_equal(found, wanted, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Libraries' own switches
# ----------------------------------------------------------------------------------------------------------------------


def _llama(on: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    return _switched(LlamaForCausalLM(config), on)


def _bert(on: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return _switched(BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=4)), on)


def _t5(on: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return _switched(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)), on)


def _switched(model: nn.Module, on: bool) -> nn.Module:
    if on:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


def _unet(on: bool) -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), dropout=0.1,
    )  # fmt: skip
    if on:
        model.enable_gradient_checkpointing()
    return model.train()


def _vit(on: bool) -> nn.Module:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 3, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
    rates = {"drop_path_rate": 0.1, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, **rates)
    model.set_grad_checkpointing(on)
    return model.train()


TOKENS = torch.arange(40).reshape(4, 10)
LIBRARIES = {
    "llama": (_llama, (), {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}),
    "bert": (_bert, (), {"input_ids": TOKENS, "labels": torch.tensor([0, 1, 1, 0])}),
    "t5": (_t5, (), {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}),
    "unet": (_unet, (torch.linspace(-1, 1, 1024).reshape(4, 4, 8, 8), torch.arange(4), torch.ones(4, 5, 16)), {}),
    "vit": (_vit, (torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32),), {}),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*functools.lru_cache:UserWarning")
def test_a_librarys_own_switch_saves_memory_and_keeps_the_gradient_with_dropout(name: str):
    make, args, kwargs = LIBRARIES[name]
    plain, repeated = _both(make, *args, **kwargs)
    plain_graph, graph = plain[0].graph, repeated[0].graph
    assert len(graph.random_number) == len(plain_graph.random_number) >= 2
    assert len(graph.tail) == len(plain_graph.tail)
    loss, wanted, all_bytes = _gradients(*plain)
    legal = [position for position, allowed in enumerate(graph.cut_allowed) if allowed]
    for cuts in ((), tuple(legal[len(legal) * k // 3] for k in (1, 2))):
        found_loss, found, few_bytes = _gradients(*repeated, cuts)
        assert torch.equal(found_loss, loss)
        _assert_equal(found, wanted, 0)
        assert few_bytes < all_bytes / 2
