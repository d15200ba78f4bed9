"""What operations cost on a device: measured where it can be, modelled where not."""

from pfeife_accelerate.cost.calibration import calibrated
from pfeife_accelerate.cost.catalogue import device, machine
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.op_profile import OpProfile, measure
from pfeife_accelerate.cost.roofline import estimate

__all__ = ["OpProfile", "calibrated", "device", "device_spec", "estimate", "link_spec", "machine", "measure"]
