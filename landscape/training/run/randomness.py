"""All randomness of a run, from its seed and the step alone.

Each draw has a generator of its own, made from (seed, purpose, step) and, for some, the learner. No state
has to be saved to resume at a step, and every process of a distributed run can make the draws that it needs
without an exchange.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

# Purposes whose streams follow from a number: those of version 0.8 and before, whose bits must stay. The
# streams of all other purposes follow from their names; nothing is added here.
_NAMES = "init", "batch", "noise", "mixing", "decompose", "delay", "push", "augment", "dropout", "monitor"
_NUMBERED = {name: number for number, name in enumerate(_NAMES)}
#: Purposes of the training loop and of mixing, which an update rule may not declare.
RESERVED = (frozenset(_NUMBERED) - {"noise", "delay", "push"}) | {"split", "heterogeneity"}


def generator(seed: int, purpose: str, step: int = 0, *learner: int) -> torch.Generator:
    """A CPU generator for one ``purpose`` at one ``step``, of one learner where it is given.

    Streams are independent of each other: of two seeds, purposes, steps or learners.

    Args:
        seed: that of the recipe.
        purpose: of the draw. An update rule declares its purposes (:attr:`.Rule.purposes`).
        step: counted from 1; 0 for a draw once in a run.
        learner: the learner's index and, where it draws several times in a step, which draw it is.
    """
    entropy = np.random.SeedSequence((seed, *_stream(purpose), step, *learner))
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))


def _stream(purpose: str) -> list[int]:
    """The words of the seed that identify ``purpose``.

    Of a name they are 124 bits of its SHA-256, in four words of 32 with the highest bit set. Seeds are below
    2⁶³, so that their upper word is below 2³¹, as are all numbers of purposes: a stream by name equals no
    stream by number, whatever the seed.
    """
    if purpose in _NUMBERED:
        return [_NUMBERED[purpose]]
    digest = hashlib.sha256(purpose.encode()).digest()
    return [int.from_bytes(digest[i : i + 4], "big") | 1 << 31 for i in range(0, 16, 4)]
