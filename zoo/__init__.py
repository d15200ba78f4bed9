"""Models to try, plan for and measure: those of the paper at full size, and small ones of the same architecture.

>>> from pfeife_accelerate.zoo import member
>>> tiny = member("llama2-7b-tiny")
>>> model, batch = tiny.build(), tiny.batch(rows=4)
>>> loss = tiny.loss(model(**batch.inputs), batch.targets)
"""

from pfeife_accelerate.zoo.model import BatchSize, ZooBatch, ZooModel
from pfeife_accelerate.zoo.paper import FIGURES, GAINS, PUBLISHED_SETTINGS, PaperFigure, PaperGain, PublishedSettings
from pfeife_accelerate.zoo.registry import MEMBERS, member

__all__ = [
    "FIGURES",
    "GAINS",
    "MEMBERS",
    "PUBLISHED_SETTINGS",
    "BatchSize",
    "PaperFigure",
    "PaperGain",
    "PublishedSettings",
    "ZooBatch",
    "ZooModel",
    "member",
]
