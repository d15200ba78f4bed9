"""Guesses of what a step will differentiate: from a call's recorded operations and the last step's expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch
import torch.nn.functional as F

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import extract
from pfeife_accelerate.session.guess import Foresight, Guess, Prediction

pytestmark = pytest.mark.local

B, V = 4, 5


class Graph:
    node_of: ClassVar[dict[str, None]] = {"logits": None}


class Call:
    """A call with one output; knows nothing of ranks."""

    graph = Graph()

    def __init__(self) -> None:
        self.asked = 0
        self.recorded: list[ref[Any]] = []
        self.leaf = Leaf(self, self, "logits", 0, 1)  # type: ignore[arg-type]

    @property
    def differentiable(self) -> bool:
        return self.asked == 0

    def note(self, record: Any) -> None:
        self.recorded.append(ref(record))

    def deferred(self, name: str) -> DeferredTensor:
        return DeferredTensor.leaf(self.leaf, (B, V), torch.float32, torch.device("cpu"), True)


Loss = Callable[[DeferredTensor], tuple[DeferredTensor, DeferredTensor]]


def learned(loss: Loss) -> Foresight:
    """Foresight after one step of a script; `loss` gives what is read and what is differentiated."""
    foresight, call = Foresight(), Call()
    foresight.learn(extract(loss(call.deferred("logits"))[1]), was_wrong=False)
    return foresight


def predicted(foresight: Foresight, read: Callable[[DeferredTensor], Any]) -> tuple[Call, Any, Prediction | None]:
    call = Call()
    seen = read(call.deferred("logits"))
    return call, seen, foresight.predict(call)  # type: ignore[arg-type]


def cross_entropy(scale: float = 1.0, extra: bool = False) -> Loss:
    labels = torch.randint(0, V, (B,))

    def loss(logits: DeferredTensor) -> tuple[DeferredTensor, DeferredTensor]:
        value = F.cross_entropy(logits, labels)
        root = value * scale + (logits.mean() if extra else 0.0)
        return value, root

    return loss


def test_what_is_recorded_after_the_read_is_taken_from_the_last_step():
    foresight = learned(cross_entropy(0.25))
    labels = torch.randint(0, V, (B,))
    _, read, prediction = predicted(foresight, lambda logits: F.cross_entropy(logits, labels))
    assert prediction is not None
    assert prediction.guess.fits(extract(read * 0.25 + 0.0))
    assert not prediction.guess.fits(extract(read * 0.5 + 0.0))
    assert not prediction.guess.fits(extract(read * 0.25 + 1.0))
    assert any(constant is labels or torch.equal(constant, labels) for constant in prediction.expression.constants)


def test_another_length_than_in_the_last_step():
    foresight = learned(lambda logits: (F.softplus(logits).mean(), F.softplus(logits).mean() / 2))
    call = Call()
    longer = DeferredTensor.leaf(call.leaf, (B, V + 3), torch.float32, torch.device("cpu"), True)
    read = F.softplus(longer).mean()
    prediction = foresight.predict(call)  # type: ignore[arg-type]
    assert prediction is not None and prediction.guess.fits(extract(read / 2))


def test_a_small_constant_that_comes_after_the_read_is_compared_by_value():
    scale = torch.tensor(8.0)
    foresight = learned(lambda logits: (logits.mean(), logits.mean() * scale))
    _, read, prediction = predicted(foresight, lambda logits: logits.mean())
    assert prediction is not None and prediction.guess.unseen == (0,)
    assert prediction.guess.fits(extract(read * torch.tensor(8.0)))
    assert not prediction.guess.fits(extract(read * torch.tensor(4.0)))


def test_a_large_constant_that_comes_after_the_read_cannot_be_known():
    weights = torch.rand(B, 40)
    foresight = learned(lambda logits: (logits.mean(), (logits.mean() * weights).sum()))
    assert predicted(foresight, lambda logits: logits.mean())[2] is None


def test_labels_that_have_not_been_seen_cannot_be_known():
    foresight = learned(lambda logits: (logits.mean(), F.mse_loss(logits, torch.rand(B, V * 1)).expand(1).sum()))
    call, _, prediction = predicted(foresight, lambda logits: logits.mean())
    # Twenty numbers are few enough to be remembered: the guess is made, and does not fit other labels.
    assert prediction is not None
    real = F.mse_loss(call.deferred("logits"), torch.rand(B, V)).expand(1).sum()
    assert not prediction.guess.fits(extract(real))


def test_numbers_drawn_after_the_read_cannot_be_known():
    mask = learned(lambda logits: (logits.mean(), F.dropout(logits.mean().expand(80)).sum()))
    assert predicted(mask, lambda logits: logits.mean())[2] is None
    drawn = learned(lambda logits: (logits.mean(), (logits.mean() * torch.bernoulli(logits.sigmoid())).mean()))
    assert predicted(drawn, lambda logits: logits.mean())[2] is None


def test_two_terms_of_one_kind_are_told_apart_by_their_order():
    first, second = torch.rand(B, V), torch.rand(B, V)

    def loss(logits: DeferredTensor) -> tuple[DeferredTensor, DeferredTensor]:
        a, b = F.mse_loss(logits, first), F.mse_loss(logits, second)
        return a, a - 2 * b

    foresight = learned(loss)
    held: list[Any] = []

    def read(logits: DeferredTensor) -> Any:
        held.extend([F.mse_loss(logits, first), F.mse_loss(logits, second)])
        return held[0]

    _, _, prediction = predicted(foresight, read)
    assert prediction is not None and prediction.guess.fits(extract(held[0] - 2 * held[1]))


def test_nothing_is_guessed_after_two_wrong_guesses_and_again_after_many_right_steps():
    loss = cross_entropy()
    foresight = learned(loss)
    for _ in range(2):
        foresight.learn(extract(loss(Call().deferred("logits"))[1]), was_wrong=True)
    assert predicted(foresight, lambda logits: loss(logits)[0])[2] is None
    for _ in range(200):
        foresight.learn(extract(loss(Call().deferred("logits"))[1]), was_wrong=False)
    assert predicted(foresight, lambda logits: loss(logits)[0])[2] is not None


def test_nothing_is_guessed_while_no_backward_follows():
    loss = cross_entropy()
    foresight = learned(loss)
    made = [predicted(foresight, lambda logits: loss(logits)[0])[2] is not None for _ in range(5)]
    assert made == [True, True, False, False, False]
    foresight.learn(extract(loss(Call().deferred("logits"))[1]), was_wrong=False)
    assert predicted(foresight, lambda logits: loss(logits)[0])[2] is not None


def test_a_guess_survives_a_message():
    guess = Guess(digest="ab", unseen=(1, 2))
    assert Guess.from_json(guess.to_json()) == guess
