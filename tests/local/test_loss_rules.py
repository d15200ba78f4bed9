"""Losses that scripts write, over a batch of eight: which keep the planned schedule, with which groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pfeife_accelerate.capture.loss_states import Refused
from pfeife_accelerate.ir.row_groups import RowGroups
from tests.loss_harness import F64, TRAINABLE, assert_exact

pytestmark = pytest.mark.local
T, V = 5, 11
generator = torch.Generator().manual_seed(3)
weights = torch.rand(V, generator=generator, dtype=F64) + 0.1
target = torch.rand(8, T, V, generator=generator, dtype=F64)
row = torch.rand(8, generator=generator, dtype=F64)
classes = torch.randint(0, V, (8,), generator=generator)
labels = torch.randint(0, V, (8, T), generator=generator)
mask = torch.rand(8, T, generator=generator) > 0.5
labels[0, :2] = -100
sign = torch.randint(0, 2, (8,), generator=generator).to(F64) * 2 - 1


def dpo(x):
    a, b = x.mean((1, 2)).chunk(2)
    return -F.logsigmoid(0.1 * (a - b)).mean()


def dpo_slice(x):
    lp = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1).sum(-1)
    return -F.logsigmoid(0.1 * (lp[:4] - lp[4:] - (row[:4] - row[4:]))).mean()


def dreambooth(x):
    a, p = x.chunk(2)
    ta, tp = target.chunk(2)
    return F.mse_loss(a, ta) + 0.5 * F.mse_loss(p, tp)


def cfg(x):
    a, b = x.chunk(2)
    return F.mse_loss(b + 3 * (a - b), target[:4])


def row_by_row(x):
    loss = 0
    for i in range(8):
        loss = loss + F.cross_entropy(x[i], labels[i])
    return loss / 8


def list_of_rows(x):
    ls = [F.mse_loss(a, b) for a, b in zip(x, target, strict=True)]
    return sum(ls) / len(ls)


def stack_of_rows(x):
    pairs = zip(x.unbind(0), target, strict=True)
    return torch.stack([F.mse_loss(a, b, reduction="none").sum().sqrt() for a, b in pairs]).mean()


def rows_of_different_lengths(x):
    lengths = [2, 3, 4, 5, 1, 2, 3, 4]
    return torch.cat([x[i, :n] for i, n in enumerate(lengths)]).log_softmax(-1)[:, 0].mean()


def rows_joined(x):
    lengths = [2, 3, 4, 5, 1, 2, 3, 4]
    return F.cross_entropy(
        torch.cat([x[i, :n] for i, n in enumerate(lengths)]),
        torch.cat([labels[i, :n] for i, n in enumerate(lengths)]).clamp(min=0),
    )


def checkpointed(x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: F.mse_loss(y.exp(), target), x, use_reentrant=False)


def summed_in_place(x):
    loss = torch.zeros((), dtype=F64)
    for i in range(8):
        loss += F.mse_loss(x[i], target[i])
    return loss / 8


LOSSES = {
    "dpo": dpo,
    "dpo_slice": dpo_slice,
    "dream": dreambooth,
    "cfg": cfg,
    "rows": row_by_row,
    "list": list_of_rows,
    "stack_rows": stack_of_rows,
    "rowlen": rows_of_different_lengths,
    "rowcat": rows_joined,
    "interleaved": lambda x: -F.logsigmoid(x[0::2, 0, 0] - x[1::2, 0, 0]).mean(),
    "viewpairs": lambda x: (lambda s: -F.logsigmoid(s[:, 0] - s[:, 1]).mean())(x.mean((1, 2)).view(-1, 2)),
    "viewpairs_softmax": lambda x: -x.mean((1, 2)).view(-1, 4).log_softmax(-1)[:, 0].mean(),
    "multiple_choice": lambda x: F.cross_entropy(x[:, 0, 0].view(-1, 2), torch.tensor([0, 1, 1, 0])),
    "view_2_half": lambda x: (lambda s: -F.logsigmoid(s[0] - s[1]).mean())(x.mean((1, 2)).view(2, -1)),
    "four_chunks": lambda x: sum((c - target[:2]).square().mean() for c in x.chunk(4)),
    "chunks_products": lambda x: (lambda a, b, c, d: (a * b * c * d).mean())(*x.chunk(4)),
    "split4": lambda x: (lambda a, b: (a * b).mean())(*x.split(4)),
    "triplet_chunks": lambda x: F.triplet_margin_loss(*x[:6, 0].chunk(3)),
    "triplet": lambda x: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
    "margin_ranking": lambda x: F.margin_ranking_loss(x[:, 0, 0], x[:, 0, 1], sign, margin=0.1),
    "margin_ranking_halves": lambda x: F.margin_ranking_loss(
        x[:4, 0, 0], x[4:, 0, 0], torch.ones(4, dtype=F64), margin=0.1
    ),
    "hinge_embedding": lambda x: F.hinge_embedding_loss(x[:, 0, 0], sign),
    "cos_emb": lambda x: F.cosine_embedding_loss(x[:, 0], x[:, 1], sign, margin=0.1),
    "cos_sim": lambda x: 1 - F.cosine_similarity(x, target, dim=-1).mean(),
    "masked_select": lambda x: torch.masked_select(x, target > 0.5).square().mean(),
    "masked_select_b": lambda x: torch.masked_select(x, mask[..., None]).square().mean(),
    "mask2": lambda x: (x[mask] * x.exp()[mask]).mean(),
    "mask_bool_where": lambda x: torch.where(mask[..., None], x, 0.0).sum() / mask.sum(),
    "index_put_mask": lambda x: (lambda y: (y.__setitem__(~mask, 0.0), y.square().mean())[1])(x.clone()),
    "setitem_mask": lambda x: (
        lambda y: (y.__setitem__((~mask)[..., None].expand(8, T, V), 0.0), y.square().mean())[1]
    )(x * 1),
    "huber": lambda x: F.huber_loss(x, target),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
    "kl_log": lambda x: F.kl_div(x.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True),
    "kl_both": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="mean"),
    "bce_posw": lambda x: F.binary_cross_entropy_with_logits(x, target, pos_weight=weights),
    "nll2d": lambda x: F.nll_loss(x.permute(0, 2, 1)[:, :, :, None].log_softmax(1), labels[..., None].clamp(min=0)),
    "ce2d_w": lambda x: F.cross_entropy(x.permute(0, 2, 1)[:, :, :, None], labels[..., None], weight=weights),
    "ce_all": lambda x: F.cross_entropy(
        x.view(-1, V), labels.view(-1), weight=weights, label_smoothing=0.1, ignore_index=-100
    ),
    "ce_all2d": lambda x: F.cross_entropy(
        x.transpose(1, 2), labels, weight=weights, label_smoothing=0.1, ignore_index=-100
    ),
    "gauss_nll": lambda x: F.gaussian_nll_loss(x, target, x.exp()),
    "gauss_nll_full": lambda x: F.gaussian_nll_loss(x[..., :5], target[..., :5], F.softplus(x[..., 5:10]), full=True),
    "poisson": lambda x: F.poisson_nll_loss(x, target),
    "multilabel_soft": lambda x: F.multilabel_soft_margin_loss(x[:, 0], (target[:, 0] > 0.5).to(F64)),
    "multi_margin": lambda x: F.multi_margin_loss(x[:, 0], classes),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(
        x[:, 0], torch.cat([classes[:, None], torch.full((8, V - 1), -1)], 1)
    ),
    "soft_margin": lambda x: F.soft_margin_loss(x, (target - 0.5).sign()),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), torch.ones(8, 2, dtype=torch.long), torch.full((8,), T), torch.full((8,), 2)
    ),
    "ctc_none": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1),
        torch.ones(8, 2, dtype=torch.long),
        torch.full((8,), T),
        torch.full((8,), 2),
        reduction="none",
    ).mean(),
    "ctc_sum": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1),
        torch.ones(8, 2, dtype=torch.long),
        torch.full((8,), T),
        torch.full((8,), 2),
        reduction="sum",
    ),
    "lse": lambda x: x.logsumexp(-1).mean() - x.logsumexp((1, 2)).mean(),
    "cumsum": lambda x: x.cumsum(1).mean(),
    "einsum": lambda x: torch.einsum("btv,bsv->bts", x, x).square().mean(),
    "einsum2": lambda x: torch.einsum("btv,v->bt", x, weights).square().mean(),
    "einsum3": lambda x: torch.einsum("btv,vw->btw", x, target[0].T).square().mean(),
    "einsum4": lambda x: torch.einsum("b,btv->tv", row, x).square().mean(),
    "einsum5": lambda x: torch.einsum("b,btv->tv", row, x).sum(),
    "bmm": lambda x: torch.bmm(x, target.transpose(1, 2)).square().mean(),
    "matmul": lambda x: (x @ x.transpose(1, 2)).square().mean(),
    "baddbmm": lambda x: torch.baddbmm(target[:, :, :T], x, x.transpose(1, 2)).square().mean(),
    "temp": lambda x: F.cross_entropy(x[:, 0] / 0.07, classes),
    "ls": lambda x: F.cross_entropy(x[:, 0], classes, label_smoothing=0.1),
    "snr": lambda x: (F.mse_loss(x, target, reduction="none").mean(dim=list(range(1, 3))) * row).mean(),
    "stack_sum": lambda x: torch.stack([x.mean(), x.square().mean()]).sum(),
    "stack_mean": lambda x: torch.stack([x.mean(), x.square().mean()]).mean(),
    "stack_weighted": lambda x: (
        torch.stack([x.mean(), x.square().mean()]) * torch.tensor([0.1, 0.2], dtype=F64)
    ).sum(),
    "tensor_of_floats": lambda x: x.mean() * torch.tensor(0.3) + torch.tensor(0.1),
    "checkpoint": checkpointed,
    "dist": lambda x: F.pairwise_distance(x[:, 0], target[:, 0]).mean(),
    "cdist_b": lambda x: torch.cdist(x, target).mean(),
    "cdist2": lambda x: torch.cdist(x, x).mean(),
    "norm": lambda x: (
        torch.linalg.norm(x, dim=-1).mean() + x.norm(p=1, dim=(1, 2)).mean() + torch.linalg.matrix_norm(x).mean()
    ),
    "fnorm_flat": lambda x: x.flatten(1).norm(dim=1).mean(),
    "infonce": lambda x: F.cross_entropy(
        F.normalize(x[:, 0], dim=-1) @ F.normalize(x[:, 1], dim=-1).T / 0.1, torch.arange(8)
    ),
    "simclr": lambda x: (lambda z: F.cross_entropy((z @ z.T).fill_diagonal_(-1e9), torch.arange(8).roll(4)))(
        F.normalize(x[:, 0], dim=-1)
    ),
    "focal": lambda x: (lambda p: -((1 - p) ** 2 * p.log()).mean())(x[:, 0].softmax(-1).gather(1, classes[:, None])),
    "onehot": lambda x: (x[:, 0].log_softmax(-1) * F.one_hot(classes, V)).sum(-1).neg().mean(),
    "dice": lambda x: (lambda p: 1 - (2 * (p * target).sum((1, 2)) + 1) / (p.sum((1, 2)) + target.sum((1, 2)) + 1))(
        x.sigmoid()
    ).mean(),
    "dice_batch": lambda x: (lambda p: 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1))(x.sigmoid()),
    "tv": lambda x: (x[:, 1:] - x[:, :-1]).abs().mean(),
    "diff": lambda x: x.diff(dim=1).abs().mean(),
    "conv": lambda x: (
        F.conv1d(x.transpose(1, 2), target[:1, :3].transpose(0, 1).contiguous().view(1, V, 3)).square().mean()
    ),
    "interp": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2, mode="linear").square().mean(),
    "avg_pool": lambda x: (
        F.avg_pool1d(x, 2).square().mean() + F.max_pool1d(x, 2).mean() + F.adaptive_avg_pool1d(x, 3).square().mean()
    ),
    "ssim_like": lambda x: F.avg_pool2d(x[:, None], 3, 1, 1).square().mean(),
    "unfold": lambda x: x.unfold(1, 2, 1).square().mean(),
    "layernorm": lambda x: F.layer_norm(x, (V,)).mul(target).mean(),
    "gelu": lambda x: (
        F.gelu(x).mean()
        + F.silu(x).mean()
        + F.softplus(x).mean()
        + F.relu(x).mean()
        + F.elu(x).mean()
        + F.leaky_relu(x).mean()
        + x.tanh().mean()
    ),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1).mean(),
    "embedding": lambda x: F.embedding(x.argmax(-1), target[0, :, :1].repeat(3, 1)[:V]).mean() + x.mean(),
    "scatter": lambda x: torch.zeros(8, V, dtype=F64).scatter(1, classes[:, None], x[:, 0, :1]).square().mean(),
    "scatter_add": lambda x: (
        torch.zeros(8, V, dtype=F64).scatter_add(1, labels.clamp(min=0), x[:, :, 0]).square().mean()
    ),
    "index_add": lambda x: torch.zeros(3, V, dtype=F64).index_add(0, classes % 3, x[:, 0]).mean(),
    "take_along": lambda x: torch.take_along_dim(x[:, 0], classes[:, None], 1).mean(),
    "fft": lambda x: torch.fft.rfft(x, dim=-1).abs().mean(),
    "diag": lambda x: torch.diagonal(x, dim1=1, dim2=2).square().mean(),
    "tril": lambda x: x.tril().square().mean(),
    "trace": lambda x: torch.einsum("bii->b", x[:, :, :T]).square().mean(),
    "logdet": lambda x: torch.linalg.slogdet(x[:, :, :T])[1].mean(),
    "solve": lambda x: torch.linalg.solve(x[:, :, :T], target[:, :, :2]).square().mean(),
    "maxpool_tokens": lambda x: x.max(1)[0].square().mean() + x.amax(1).mean(),
    "median": lambda x: x.median(1)[0].mean() + x.quantile(0.5, dim=1).mean(),
    "kthvalue": lambda x: x.kthvalue(2, dim=1)[0].mean(),
    "kl_halves": lambda x: F.kl_div(x[:4].log_softmax(-1), x[4:].softmax(-1), reduction="batchmean"),
    "rdrop": lambda x: (
        (
            lambda p, q: (
                0.5
                * (
                    F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
                    + F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")
                )
            )
        )(*x.chunk(2))
        + F.cross_entropy(x[:, 0], classes)
    ),
    "mixup": lambda x: 0.3 * F.cross_entropy(x[:, 0], classes) + 0.7 * F.cross_entropy(x[:, 0], classes.flip(0)),
    "mixup_t": lambda x: (
        row[0] * F.cross_entropy(x[:, 0], classes) + (1 - row[0]) * F.cross_entropy(x[:, 0], classes.flip(0))
    ),
    "grouped": lambda x: x.view(4, 2, T, V).mean(1).square().mean(),
    "grpo": lambda x: (
        lambda r: ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).mul(row.view(2, 4)).mean()
    )(x.mean((1, 2)).view(-1, 4)),
    "clamp_loss_rows": lambda x: F.mse_loss(x, target, reduction="none").mean((1, 2)).clamp(max=2).mean(),
    "ohem": lambda x: F.mse_loss(x, target, reduction="none").mean((1, 2)).topk(4).values.mean(),
    "iadd": summed_in_place,
    "pair_rows": lambda x: sum(F.mse_loss(x[i], x[i + 1]) for i in range(0, 8, 2)),
    "pair_rows_h": lambda x: sum(F.mse_loss(x[i], x[i + 4]) for i in range(4)),
    "cat_halves": lambda x: torch.cat([x[:4], x[4:]], 1).square().mean(),
    "cat_back": lambda x: F.mse_loss(torch.cat([x[:4] * 2, x[4:] * 3]), target),
    "cat_swapped": lambda x: F.mse_loss(torch.cat([x[4:] * 2, x[:4] * 3]), target),
    "repeat_interleave": lambda x: F.mse_loss(x[:, 0].repeat_interleave(2, 0), target.repeat(2, 1, 1)[:, 0]),
    "repeat": lambda x: F.mse_loss(x[:, 0].repeat(2, 1), target.repeat(2, 1, 1)[:, 0]),
    "ratio_losses": lambda x: x.square().mean() / x.detach().square().mean(),
    "exp_loss": lambda x: F.cross_entropy(x[:, 0], classes).exp(),
    "trainable": lambda x: F.cross_entropy(x[:, 0] * TRAINABLE[0], classes) + TRAINABLE[0].square().sum(),
    "uncertainty": lambda x: (x.square().mean() * (-TRAINABLE[1]).exp() + TRAINABLE[1]) * 0.5,
    "linear_crit": lambda x: F.linear(x, TRAINABLE[0][None]).square().mean(),
    "addmm_crit": lambda x: F.linear(x[:, 0], TRAINABLE[0][None], TRAINABLE[1][None]).square().mean(),
    "arcface": lambda x: F.cross_entropy(
        F.linear(F.normalize(x[:, 0]), F.normalize(TRAINABLE[0][:, None].expand(V, V) + torch.eye(V, dtype=F64))) * 10,
        classes,
    ),
    "center": lambda x: (x[:, 0] - TRAINABLE[0][classes][:, None]).square().mean(),
}


HALVES, PAIRS, FOURS = RowGroups(parts=2), RowGroups(run=2), RowGroups(run=4)
GROUPS = {
    **dict.fromkeys(
        ("dpo", "dpo_slice", "cfg", "view_2_half", "split4", "margin_ranking_halves", "kl_halves", "rdrop"), HALVES
    ),
    **dict.fromkeys(("pair_rows_h", "cat_halves"), HALVES),
    **dict.fromkeys(("interleaved", "viewpairs", "multiple_choice", "grouped", "pair_rows"), PAIRS),
    **dict.fromkeys(("viewpairs_softmax", "grpo"), FOURS),
    "chunks_products": RowGroups(parts=4),
}
"""Losses that need more in a micro-batch than any rows side by side."""
REFUSED = {
    "triplet_chunks": "sub.Tensor",  # six of the eight rows, in thirds
    "gauss_nll": "gaussian_nll_loss",  # looks at its variances
    "gauss_nll_full": "gaussian_nll_loss",
    "ctc": "ctc_loss",  # looks at its lengths
    "ctc_none": "ctc_loss",
    "ctc_sum": "ctc_loss",
    "einsum4": "pow",
    "infonce": "mm",
    "simclr": "fill_",
    "dice_batch": "div",
    "gumbel": "exponential",
    "index_add": "index_add",
    "solve": "_linalg_check_errors",
    "median": "squeeze_",
    "ohem": "topk",
    "ratio_losses": "div",
    "exp_loss": "exp",
}
"""Losses that take the exact two-phase order, and the operation that the refusal names."""


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in REFUSED])
def test_a_loss_keeps_the_planned_schedule(name):
    x = torch.randn(8, T, V, generator=torch.Generator().manual_seed(5), dtype=F64)
    planned = assert_exact(LOSSES[name], [x], [0], ((2, 3, 2, 1), (1,) * 8, (8,)))
    assert planned.groups == GROUPS.get(name, RowGroups())


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_is_refused_by_name(name):
    with pytest.raises(Refused, match=REFUSED[name]):
        assert_exact(LOSSES[name], [torch.randn(8, T, V, dtype=F64)], [0], ((8,),))
