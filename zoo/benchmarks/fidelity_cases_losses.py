"""Losses that scripts write: outside the model, over tokens, over pairs of rows, over the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fidelity_kit import Run, case, token_loss


@case(model="llama", loss="causal LM inside")
def one_microbatch_without_labels(run: Run) -> None:
    """All labels of one micro-batch are -100."""
    training = run.prepare("llama")
    for _ in range(3):
        batch = training.batch()
        batch["labels"][2:4] = -100
        training.step(batch)


@case(model="llama", loss="cross entropy outside")
def loss_outside(run: Run) -> None:
    """The script computes the loss from the logits, and reads the logits."""
    training = run.prepare("llama")
    for _ in range(3):
        batch = training.batch()
        labels = batch.pop("labels")
        outputs = training.model(**batch)
        loss = token_loss(outputs.logits, labels)
        training.backward(loss)
        run.record("logits", outputs.logits)
        training.update(loss)


@case(model="llama", loss="sum over counted tokens")
def sum_over_counted_tokens(run: Run) -> None:
    """A sum divided by the number of tokens that count."""
    training = run.prepare("llama")
    for _ in range(2):
        batch = training.batch()
        labels = batch.pop("labels")
        logits = training.model(**batch).logits
        loss = token_loss(logits, labels, reduction="sum") / (labels[:, 1:] != -100).sum()
        training.backward(loss)
        training.update(loss)


@case(model="llama", loss="causal LM inside")
def number_of_items_given_to_the_model(run: Run) -> None:
    """`num_items_in_batch` as a tensor and as an int."""
    training = run.prepare("llama")
    for step in range(4):
        batch = training.batch()
        count = (batch["labels"][:, 1:] != -100).sum()
        outputs = training.model(**batch, num_items_in_batch=count if step % 2 else int(count))
        training.backward(outputs.loss)
        training.update(outputs.loss)


@case(model="llama", loss="two heads' losses and a penalty")
def two_losses_added(run: Run) -> None:
    """Losses added, with class weights and label smoothing; the parts are read."""
    training = run.prepare("llama")
    weight = torch.linspace(0.5, 1.5, 96, dtype=run.dtype)
    for _ in range(2):
        batch = training.batch()
        outputs = training.model(**batch)
        other = token_loss(outputs.logits, batch["labels"], weight=weight, label_smoothing=0.1)
        penalty = outputs.logits.logsumexp(-1).square().mean()
        loss = outputs.loss + 0.5 * other + 1e-3 * penalty
        training.backward(loss)
        run.record("parts", [outputs.loss.item(), other.item(), penalty.item()])
        training.update(loss)


@case(model="encoder", loss="contrastive, in-batch negatives")
def contrastive(run: Run) -> None:
    """A loss that does not separate over the batch: every row is compared with every other."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        embeddings = F.normalize(training.model(batch["x"]), dim=-1)
        loss = F.cross_entropy(embeddings @ embeddings.T / 0.1, torch.arange(8).roll(1))
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="batch-hard triplet", ranks=(3,))
def batch_hard_triplet(run: Run) -> None:
    """The hardest positive and negative of each row, found over the whole batch."""
    training = run.prepare("encoder", rate=0.1)
    same = torch.arange(8)[:, None] % 3 == torch.arange(8)[None] % 3
    for _ in range(3):
        embeddings = training.model(training.batch()["x"])
        distance = torch.cdist(embeddings, embeddings)
        positive = distance.masked_fill(~same, 0).amax(1)
        negative = distance.masked_fill(same, 1e9).amin(1)
        loss = F.relu(positive - negative + 0.5).mean()
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="sqrt of a mean")
def root_of_a_mean(run: Run) -> None:
    """A root of a mean does not separate either."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        loss = F.mse_loss(training.model(batch["x"]), batch["target"]).sqrt()
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="instance and prior halves")
def halves_of_the_batch(run: Run) -> None:
    """`torch.chunk(prediction, 2)`: instance and prior halves with their own losses."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        instance, prior = torch.chunk(training.model(batch["x"]), 2, dim=0)
        wanted, wanted_prior = torch.chunk(batch["target"], 2, dim=0)
        loss = F.mse_loss(instance, wanted) + 0.7 * F.mse_loss(prior, wanted_prior)
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="preference, logsigmoid of a difference")
def preferred_and_rejected(run: Run) -> None:
    """Preferred and rejected halves with `logsigmoid` of their difference."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        scores = (training.model(batch["x"]) * batch["target"]).sum(-1)
        preferred, rejected = scores.chunk(2)
        loss = -F.logsigmoid(0.3 * (preferred - rejected)).mean()
        training.backward(loss)
        run.record("accuracy", (preferred > rejected).double().mean().item())
        training.update(loss)


@case(model="unet", loss="mse with SNR weights")
def weighted_by_signal_to_noise(run: Run) -> None:
    """Per-sample weights on `loss.mean(dim=list(range(1, n)))`, in float32 arithmetic outside the model."""
    training = run.prepare("unet")
    for _ in range(2):
        batch = training.batch()
        target = batch.pop("target")
        snr = (batch["timestep"] + 1).to(run.dtype) / 500
        weights = torch.stack([snr, 5 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
        predicted = training.model(**batch).sample
        loss = F.mse_loss(predicted.to(run.dtype), target, reduction="none")
        loss = (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="mse", ranks=(3,))
def two_calls_in_one_loss(run: Run) -> None:
    """Two forward passes of one model in one loss, as query and passage."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        first, second = training.batch(), training.batch()
        loss = F.mse_loss(training.model(first["x"]), training.model(second["x"]) * 2)
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="mse")
def backward_with_gradients_given(run: Run) -> None:
    """`torch.autograd.backward(outputs, gradients)`."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(3):
        batch = training.batch()
        outputs = training.model(batch["x"])
        if step % 2:
            torch.autograd.backward(outputs, batch["target"])
        else:
            torch.autograd.backward([outputs], [batch["target"]])
        training.record_gradients()
        training.update()


@case(model="llama", loss="label smoothing and class weights outside")
def smoothed_and_weighted(run: Run) -> None:
    """Label smoothing alone, class weights alone, and both, over labels with -100."""
    training = run.prepare("llama")
    weight = torch.linspace(0.2, 2.0, 96, dtype=run.dtype)
    for options in ({"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.2}):
        batch = training.batch()
        labels = batch.pop("labels")
        loss = token_loss(training.model(**batch).logits, labels, **options)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="encoder", loss="distillation, KL divergence")
def distillation_from_logits(run: Run) -> None:
    """`kl_div` with `batchmean` to soft targets, and a cosine loss."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        outputs = training.model(batch["x"])
        soft = F.softmax(batch["target"] / 2, dim=-1)
        loss = F.kl_div(F.log_softmax(outputs / 2, dim=-1), soft, reduction="batchmean") * 4
        loss = loss + (1 - F.cosine_similarity(outputs, batch["target"], dim=-1)).mean()
        training.backward(loss)
        training.update(loss)


@case(model="encoder", loss="several, elementwise")
def losses_of_torch(run: Run) -> None:
    """Huber, smooth L1, L1, binary cross entropy with logits, hinge, Poisson and Gaussian losses in turn."""
    training = run.prepare("encoder", rate=0.1)
    losses = (
        lambda o, t: F.huber_loss(o, t, delta=0.3),
        lambda o, t: F.smooth_l1_loss(o, t),
        lambda o, t: F.l1_loss(o, t, reduction="sum") / o.numel(),
        lambda o, t: F.binary_cross_entropy_with_logits(o, (t > 0).to(o.dtype)),
        lambda o, t: F.relu(1 - o * t.sign()).mean(),
        lambda o, t: F.poisson_nll_loss(o, t.abs()),
        lambda o, t: F.gaussian_nll_loss(o, t, t.abs() + 0.1),
    )
    for loss_of in losses:
        batch = training.batch()
        loss = loss_of(training.model(batch["x"]), batch["target"])
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="encoder", loss="differences of neighbouring rows")
def pairs_of_rows(run: Run) -> None:
    """Rows paired by strides and by views: even with odd, chosen with rejected."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        outputs = training.model(training.batch()["x"])
        if step % 2:
            first, second = outputs[::2], outputs[1::2]
        else:
            first, second = outputs.view(4, 2, 16).unbind(1)
        loss = F.softplus(-(first - second).sum(-1)).mean()
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="encoder", loss="triplets by index")
def triplets_by_index(run: Run) -> None:
    """Anchors, positives and negatives picked from the batch by index tensors."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        outputs = training.model(training.batch()["x"])
        anchor, positive, negative = (outputs[torch.randperm(8)[:5]] for _ in range(3))
        loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.4)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)
