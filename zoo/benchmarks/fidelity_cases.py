"""All cases, in one registry; importing a topic's file registers its cases."""

from __future__ import annotations

import fidelity_cases_gradients
import fidelity_cases_graphs
import fidelity_cases_losses
import fidelity_cases_models
import fidelity_cases_modes
import fidelity_cases_networks
import fidelity_cases_parameters
import fidelity_cases_precision
import fidelity_cases_reaching
import fidelity_cases_reading
import fidelity_cases_shapes
from fidelity_kit import CASES

# The bodies of other topics, so these must have been registered.
import fidelity_cases_placements  # isort: skip
import fidelity_cases_halves  # isort: skip

TOPICS = (
    fidelity_cases_models,
    fidelity_cases_losses,
    fidelity_cases_shapes,
    fidelity_cases_parameters,
    fidelity_cases_gradients,
    fidelity_cases_modes,
    fidelity_cases_networks,
    fidelity_cases_reading,
    fidelity_cases_precision,
    fidelity_cases_graphs,
    fidelity_cases_reaching,
    fidelity_cases_placements,
    fidelity_cases_halves,
)

__all__ = ["CASES", "TOPICS"]
