"""Models to plan for by name, built without memory and without weights, and what their operations should cost."""

from pfeife_accelerate.tools.models.case import ModelCase, ModelOptions
from pfeife_accelerate.tools.models.modelled import ModelledModel
from pfeife_accelerate.tools.models.names import resolve

__all__ = ["ModelCase", "ModelOptions", "ModelledModel", "resolve"]
