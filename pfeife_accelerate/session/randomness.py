"""The seed of a model's call, taken from the script's generators without drawing from them, and how far these are.

Models: the seed follows from the state of torch's CPU generator and the number of calls made in that state, which is
kept in the state itself, in bits that no draw depends on. So whatever saves, restores, sets or sends a state
(`torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng`, a checkpoint) does so with the number of calls.
Ignores: for seeds, the generators of other devices.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from pfeife_accelerate.compat import generator_words, set_generator_words

__all__ = ["digest_of_generators", "return_seed", "take_seed"]

_COUNT = 0x7FFFFFFF


def take_seed() -> int:
    """The seed of a call that draws random numbers; the next call's will be another."""
    words = generator_words(torch.default_generator)
    seed = int.from_bytes(hashlib.blake2b(words.numpy().tobytes(), digest_size=8).digest(), "big") >> 1
    _count(1)
    return seed


def return_seed() -> None:
    """The latest call does not count: no other rank has made it."""
    _count(-1)


def digest_of_generators() -> str:
    """Differs where the generators of torch (of the CPU and the current CUDA device), numpy and random differ."""
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    _, words, position, *_ = np.random.get_state()
    found.update(np.asarray(words).tobytes())
    found.update(f"{position} {hash(random.getstate()[1])}".encode())
    return found.hexdigest()


def _count(step: int) -> None:
    # The lower 31 bits of the Mersenne Twister's first word reach nothing: when the state is renewed they are replaced,
    # and only the upper bit has a part in the new words. Until then the word has been drawn, or comes to be renewed.
    words = generator_words(torch.default_generator)
    first = int(words[0])
    words[0] = (first & ~_COUNT) | ((first + step) & _COUNT)
    set_generator_words(torch.default_generator, words)
