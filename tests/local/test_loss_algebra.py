"""Losses computed a micro-batch at a time, against the same expression on real tensors over the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from pfeife_accelerate.capture.deferred import FAKE_MODE, DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import extract
from pfeife_accelerate.capture.loss import Rows, SplitLoss, split
from pfeife_accelerate.capture.loss_states import Refused

pytestmark = pytest.mark.local

Loss = Callable[..., torch.Tensor]
B, T, V = 7, 5, 11
MICROBATCHES = ((2, 2, 2, 1), (1,) * 7, (7,))
F64 = torch.float64


class Call:
    differentiable = True


class Whole:
    """A resolver that has the whole batch's value at hand."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        return self.value


def deferred(value: torch.Tensor, batch_dim: int | None = 0, rows: int = 1, call: Call | None = None) -> DeferredTensor:
    leaf = Leaf(Whole(value.detach()), call or Call(), f"value{id(value)}", batch_dim, rows)  # type: ignore[arg-type]
    return DeferredTensor.leaf(leaf, tuple(value.shape), value.dtype, value.device, value.is_floating_point())


def split_loss(loss: Loss, outputs: Sequence[torch.Tensor], dims: Sequence[int | None], batch: int) -> tuple:
    call = Call()
    result = loss(*(deferred(x, dim, x.shape[dim] // batch if dim is not None else 1, call) for x, dim in zip(outputs, dims, strict=True)))
    if not isinstance(result, DeferredTensor):
        raise Refused("real", "")
    expression = extract(result)
    order = [next(i for i, x in enumerate(outputs) if leaf.value == f"value{id(x)}") for leaf in expression.leaf_info]
    return expression, split(expression, FAKE_MODE, batch), order


def by_microbatches(
    expression, planned: SplitLoss, order: Sequence[int], outputs, dims, sizes: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Whole-batch scalars, and gradients of the outputs, from micro-batches of these sizes."""
    batch, start, parts = sum(sizes), 0, []
    gradients = [torch.zeros_like(x) for x in outputs]
    whole = planned.prepare(expression.constants)
    for count in sizes:
        rows = Rows(start=start, count=count, total=batch)
        leaves = []
        for i in order:
            x, dim = outputs[i].detach(), dims[i]
            per_item = x.shape[dim] // batch if dim is not None else 1
            part = x if dim is None else x.narrow(dim, start * per_item, count * per_item)
            leaves.append(part.clone().requires_grad_(x.is_floating_point()))
        part = planned.run(leaves, whole, rows)
        if part[0].requires_grad:
            part[0].backward()
        for i, leaf in zip(order, leaves, strict=True):
            if leaf.grad is None:
                continue
            dim = dims[i]
            per_item = outputs[i].shape[dim] // batch if dim is not None else 1
            target = gradients[i] if dim is None else gradients[i].narrow(dim, start * per_item, count * per_item)
            target += leaf.grad
        parts.append(tuple(p.detach() for p in part))
        start += count
    return [planned.total(i, [p[i] for p in parts]) for i in range(len(parts[0]))], gradients


def assert_exact(loss: Loss, outputs, dims, sizes_list, tolerance: float = 1e-12) -> None:
    batch = sum(sizes_list[0])
    expression, planned, order = split_loss(loss, outputs, dims, batch)
    real = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in outputs]
    expected = loss(*real)
    if expected.requires_grad:
        expected.backward()
    scalars = expression.replay([real[i].detach() for i in order], expression.constants)
    for sizes in sizes_list:
        totals, gradients = by_microbatches(expression, planned, order, outputs, dims, sizes)
        for total, scalar in zip(totals, [expected.detach(), *scalars[1:]], strict=True):
            assert total.dtype == scalar.dtype
            torch.testing.assert_close(total.reshape(scalar.shape), scalar, rtol=tolerance, atol=tolerance, equal_nan=True)
        for gradient, x in zip(gradients, real, strict=True):
            wanted = torch.zeros_like(x) if x.grad is None else x.grad
            scale = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(gradient, wanted.detach(), rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def constants():
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=F64)

    class Constants:
        labels = torch.randint(0, V, (B, T), generator=generator)
        classes = torch.randint(0, V, (B,), generator=generator)
        weights = rand(V) + 0.1
        target = rand(B, T, V)
        row = rand(B) + 0.1
        square = rand(B, B)
        item_mask = rand(B) > 0.4
        mask = rand(B, T) > 0.4

    Constants.labels[rand(B, T) < 0.4] = -100
    Constants.labels[2:4] = -100  # one micro-batch without a single valid token
    return Constants


C = constants()


@torch.no_grad()
def without_grad(f, *args):
    return f(*args)


def causal_lm(x):
    return F.cross_entropy(x[:, :-1].reshape(-1, V), C.labels[:, 1:].reshape(-1))


def inplace_division(x):
    loss = F.mse_loss(x, C.target)
    loss /= 4
    loss += 1.5
    return loss


def masked_token_mean(x):
    nll = F.cross_entropy(x.transpose(1, 2), C.labels, reduction="none")
    return (nll * C.mask).sum() / C.mask.sum()


def prior_preservation(x):
    (a, b), (ta, tb) = torch.chunk(x[:6], 2, dim=0), torch.chunk(C.target[:6], 2, dim=0)
    return F.mse_loss(a, ta) + 0.7 * F.mse_loss(b, tb)


def straight_through(x):
    p = x.softmax(-1)
    hard = (p == p.amax(-1, keepdim=True)).to(p.dtype)
    return ((hard - p.detach() + p) * C.target).sum(-1).mean()


def focal(x):
    log_p = x[:, 0].log_softmax(-1).gather(1, C.classes[:, None]).squeeze(1)
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


SPLIT: dict[str, Loss] = {
    "causal_lm": causal_lm,
    "lm_sum_over_count": lambda x: F.cross_entropy(x.view(-1, V), C.labels.view(-1), reduction="sum") / torch.tensor(17.0, dtype=F64) / 4,
    "class_weights": lambda x: F.cross_entropy(x.view(-1, V), C.labels.view(-1), weight=C.weights),
    "label_smoothing": lambda x: F.cross_entropy(x.view(-1, V), C.labels.view(-1), label_smoothing=0.1),
    "smoothing_and_weights": lambda x: F.cross_entropy(x.view(-1, V), C.labels.view(-1), weight=C.weights, label_smoothing=0.1),
    "ignore_index": lambda x: F.cross_entropy(x[:, 0], C.classes, ignore_index=int(C.classes[0])),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), C.labels),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), C.labels),
    "transposed_negative": lambda x: F.cross_entropy(x.transpose(-1, -2), C.labels),
    "tokens_none": lambda x: F.cross_entropy(x.view(-1, V), C.labels.view(-1), reduction="none").view(B, T).sum(-1).mean(),
    "classes": lambda x: F.cross_entropy(x[:, 0], C.classes, label_smoothing=0.1),
    "soft_targets": lambda x: F.cross_entropy(x[:, 0], C.target[:, 0]),
    "mse": lambda x: F.mse_loss(x, C.target),
    "mse_sum": lambda x: F.mse_loss(x, C.target, reduction="sum"),
    "rmse_of_rows": lambda x: ((x - C.target) ** 2).mean((1, 2)).sqrt().mean(),
    "snr": lambda x: (F.mse_loss(x.float().double(), C.target, reduction="none").mean(dim=[1, 2]) * C.row).mean(),
    "two_terms": lambda x: F.mse_loss(x, C.target) + 0.3 * F.l1_loss(x, C.target) + 1.5,
    "one_minus": lambda x: 1 - F.mse_loss(x, C.target),
    "constant_minus": lambda x: C.row.sum() - x.mean() * 3,
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, C.target),
    "bce_pos_weight": lambda x: F.binary_cross_entropy_with_logits(x, C.target, pos_weight=C.weights),
    "bce_weight": lambda x: F.binary_cross_entropy_with_logits(x, C.target, weight=C.weights),
    "bce_of_sigmoid": lambda x: F.binary_cross_entropy(x.sigmoid(), C.target),
    "huber": lambda x: F.huber_loss(x, C.target),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, C.target, beta=0.3),
    "soft_margin": lambda x: F.soft_margin_loss(x, C.target.sign()),
    "masked_logsumexp": lambda x: ((x.logsumexp(-1) - x[..., 0]) * (C.labels != -100)).sum() / (C.labels != -100).sum(),
    "masked_token_mean": masked_token_mean,
    "gathered": lambda x: -(x.log_softmax(-1).gather(-1, C.labels.clamp(min=0)[..., None]).squeeze(-1) * (C.labels != -100)).sum(-1).mean(),
    "kl_batchmean": lambda x: F.kl_div(x.log_softmax(-1), C.target.softmax(-1), reduction="batchmean"),
    "distillation": lambda x: F.kl_div((x / 2).log_softmax(-1), (C.target / 2).softmax(-1), reduction="batchmean") * 4,
    "cosine": lambda x: 1 - F.cosine_similarity(x, C.target, dim=-1).mean(),
    "cosine_of_zero_rows": lambda x: 1 - F.cosine_similarity(x * C.mask[..., None], C.target, dim=-1).mean(),
    "inplace": inplace_division,
    "detached_target": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "detached_no_grad": lambda x: F.mse_loss(x, without_grad(lambda y: y.softmax(-1), x)),
    "data_attribute": lambda x: (x * x.data).mean(),
    "detach_in_the_middle": lambda x: (x.softmax(-1).detach() * x).sum(-1).mean(),
    "loss_minus_itself": lambda x: F.mse_loss(x, C.target) * 2 - F.mse_loss(x, C.target).detach(),
    "ellipsis_keeps_the_gradient": lambda x: x[...].square().mean(),
    "full_slice": lambda x: x[:].square().mean(),
    "none_index": lambda x: (x[:, None] * C.target[:, None]).mean(),
    "straight_through": straight_through,
    "focal": focal,
    "where_item_mask": lambda x: torch.where(C.item_mask[:, None], x[:, 0], torch.zeros((), dtype=F64)).mean(),
    "masked_fill": lambda x: x.masked_fill(~C.mask[..., None], 0.0).square().sum() / C.mask.sum(),
    "prior_preservation": prior_preservation,
    "first_items": lambda x: F.mse_loss(x[:3], C.target[:3]) + x[5:].mean(),
    "first_items_of_first_items": lambda x: x[1:6][1:3].square().mean(),
    "first_flattened_items": lambda x: x.reshape(B * T, V)[: 4 * T].square().mean(),
    "one_item": lambda x: x[2:3, 0].square().mean(),
    "one_element_of_the_batch": lambda x: x[3:4, 0, 0].square().sum() * 2,
    "linear_head": lambda x: F.linear(x, C.target[0], C.target[0, :, 0]).square().mean(),
    "einsum_of_rows": lambda x: torch.einsum("btv,bsv->bts", x, C.target).square().mean(),
    "norm_of_rows": lambda x: x.norm(dim=-1).mean() + torch.linalg.vector_norm(x, 1, (1, 2)).mean(),
    "normalize": lambda x: (F.normalize(x, dim=-1) * C.target).sum(-1).mean(),
    "layer_statistics": lambda x: ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)).square().mean(),
    "max_within_rows": lambda x: x.max(-1).values.mean() + x.amin((1, 2)).mean(),
    "sorted_rows": lambda x: (x.sort(-1).values * C.target).mean(),
    "cumsum_of_rows": lambda x: x.cumsum(1).square().mean(),
    "flip_of_rows": lambda x: (x.flip(1) * C.target).mean(),
    "topk_of_rows": lambda x: x.topk(3, dim=-1).values.mean(),
    "chunk_of_channels": lambda x: (lambda a, b: (a * b.exp()).mean())(*x[..., :10].chunk(2, dim=-1)),
    "unbind_of_tokens": lambda x: sum(part.square().mean() for part in x.unbind(1)) / T,
    "stack_and_cat": lambda x: torch.cat([torch.stack([x, C.target], 1), x[:, None]], 1).square().mean(),
    "columns_by_index": lambda x: x[:, [0, 2]].square().mean() + x[..., torch.tensor([1, 1, 3])].mean(),
    "row_constant_times_matrix": lambda x: (x[:, 0] * C.row[:, None]).sum(),
    "outer_with_rows": lambda x: (x[:, 0, 0][:, None] * C.row[None, :]).sum(),
    "count_of_correct": lambda x: x.mean() + (x.argmax(-1) == C.labels).sum().to(F64) * 0.5,
    "zeros_like_term": lambda x: (x + torch.zeros_like(x)).mean(),
    "logsigmoid": lambda x: -F.logsigmoid(x[:, 0, 0] * C.row - x[:, 0, 1]).mean(),
    "repeated_loss": lambda x: F.mse_loss(x, C.target).repeat(3).sum() / 3,
    "stacked_terms": lambda x: torch.stack([x.mean(), x.square().mean(), torch.tensor(2.0, dtype=F64)]).sum(),
    "unflattened": lambda x: x.flatten(0, 1).unflatten(0, (B, T)).mean(1).square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_loss_is_the_whole_batch_loss(name):
    assert_exact(SPLIT[name], [torch.randn(B, T, V, dtype=F64)], [0], MICROBATCHES)


def triplet(x):
    e = x[:, 0]
    d = (e[:, None] - e[None]).norm(dim=-1)
    return (d.amax(1) - d.amin(1) + 0.2).relu().mean()


def scatter_rows(x):
    y = x.clone()
    y[0] = 0.0
    return y.square().mean()


def view_then_change(x):
    y = x * 1
    z = y.view(B, T * V)
    y += C.target
    return z.square().mean()


REFUSED: dict[str, Loss] = {
    "contrastive": lambda x: F.cross_entropy(x[:, 0] @ x[:, 1].T, torch.arange(B)),
    "sqrt_of_mean": lambda x: F.mse_loss(x, C.target).sqrt(),
    "power_of_mean": lambda x: x.mean() ** 2,
    "square_of_mean": lambda x: x.mean() * x.mean(),
    "mean_times_itself": lambda x: (lambda m: m * m)(x.mean()),
    "product_of_means": lambda x: x.mean() * x.square().mean(),
    "ratio_of_means": lambda x: x.mean() / x.square().mean(),
    "ratio_to_constant": lambda x: 1 / x.square().mean(),
    "loss_times_detached_loss": lambda x: x.mean() * x.mean().detach(),
    "normalized_by_detached": lambda x: x.mean() / x.mean().detach(),
    "count_from_outputs": lambda x: (x * (x > 0)).sum() / (x > 0).sum(),
    "softmax_over_batch": lambda x: (x.softmax(0) * C.target).sum(),
    "log_softmax_over_batch": lambda x: x[:, 0, 0].log_softmax(0).mean(),
    "batch_hard_triplet": triplet,
    "batch_norm_like": lambda x: (x - x.mean(0)).square().mean(),
    "batch_norm_like_keepdim": lambda x: (x - x.mean(0, keepdim=True)).square().mean(),
    "batch_norm": lambda x: F.batch_norm(x[:, 0], None, None, training=True).square().mean(),
    "variance_over_batch": lambda x: x.var(0).mean(),
    "std_over_all": lambda x: x.std(),
    "max_over_batch": lambda x: x.max(0).values.mean(),
    "amax_over_all": lambda x: x.amax(),
    "sort_over_batch": lambda x: (x.sort(0).values * C.target).mean(),
    "cumsum_over_batch": lambda x: x.cumsum(0).square().mean(),
    "cumsum_over_flattened": lambda x: (x.reshape(B * T, V).cumsum(0) * C.target.view(B * T, V)).mean(),
    "flip_of_batch": lambda x: (x.flip(0) * C.target).mean(),
    "flip_of_batch_negative": lambda x: (x.flip(-3) * C.target).mean(),
    "roll_of_batch": lambda x: (x.roll(1, 0) * C.target).mean(),
    "shift_of_batch": lambda x: (x[1:] - x[:-1]).square().mean(),
    "shift_by_padding": lambda x: (F.pad(x, (0, 0, 0, 0, 1, -1)) * C.target).mean(),
    "shift_of_flattened_tokens": lambda x: (x.reshape(B * T, V)[1:] * C.target.view(B * T, V)[1:]).mean(),
    "every_second_item": lambda x: x[::2].square().mean() * 1.0,
    "permuted_batch": lambda x: (x[torch.randperm(B)] * C.target).mean(),
    "index_select_of_batch": lambda x: (x.index_select(0, torch.randperm(B)) * C.target).mean(),
    "gather_over_batch": lambda x: x[:, 0].gather(0, torch.randint(0, B, (B, V))).mean(),
    "masked_rows": lambda x: (x[C.item_mask] * C.target[C.item_mask]).mean(),
    "pairwise": lambda x: torch.cdist(x[:, 0], x[:, 0]).mean(),
    "all_pairs_by_broadcast": lambda x: (x[:, 0, 0] - x[:, 0, :1]).square().mean(),
    "nonlinear_after_mean_of_rows": lambda x: x.mean((1, 2)).mean(0).exp(),
    "logsumexp_over_batch": lambda x: x.logsumexp(0).mean(),
    "norm_of_all": lambda x: x.norm(),
    "norm_of_stacked_terms": lambda x: torch.stack([x.mean(), x.square().mean()]).norm(),
    "max_of_terms": lambda x: torch.maximum(x.mean(), x.square().mean()),
    "clamped_loss": lambda x: F.mse_loss(x, C.target).clamp(min=0.3),
    "rounded_sum": lambda x: x.sum().to(torch.int64).to(F64) + x.mean(),
    "integer_count_plus_one": lambda x: x.mean() + ((x > 0).sum() + 1).to(F64),
    "batch_behind_another_dim": lambda x: x.transpose(0, 1).reshape(T * B, V).softmax(-1).view(B, T, V).mul(C.target).mean(),
    "rows_times_batch": lambda x: (x[:, 0].T @ x[:, 1]).square().mean(),
    "matrix_from_the_left": lambda x: (C.square @ x[:, 0]).square().mean(),
    "per_item_bias_of_addmm": lambda x: torch.addmm(x[:, 0], x[:, 1], C.target[0, :, :1] @ C.target[0, :1]).mean() if False else x.median(),
    "dropout": lambda x: torch.bernoulli(x.sigmoid()).mean() + x.mean(),
    "item_set_to_zero": scatter_rows,
    "change_seen_through_a_view": view_then_change,
    "not_reduced": lambda x: x[0, 0, 0] * 1.0,
    "reinterpreted": lambda x: (x.view(torch.complex128) if False else x[..., :10].contiguous().view(torch.complex128)).abs().mean(),
    "head_outside_the_model": lambda x: (x * torch.ones(V, dtype=F64, requires_grad=True)).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_mixes_items_is_refused_or_else_exact(name):
    """`EXACT_ANYWAY` names the few that a finer rule may take; none may be split wrongly."""
    try:
        assert_exact(REFUSED[name], [torch.randn(B, T, V, dtype=F64)], [0], MICROBATCHES)
    except Refused:
        return
    pytest.fail("split, though it mixes items")


def test_a_refusal_names_the_operation_and_the_line():
    with pytest.raises(Refused) as refusal:
        split_loss(REFUSED["sqrt_of_mean"], [torch.randn(B, T, V, dtype=F64)], [0], B)
    assert refusal.value.operation == "sqrt.default"
    assert "test_loss_algebra.py:" in refusal.value.where


def test_a_traceless_step_is_refused_with_its_name():
    with pytest.raises(Refused, match="one_hot|getitem|nonzero"):
        split_loss(lambda x: x[x > 0].mean(), [torch.randn(B, T, V, dtype=F64)], [0], B)
