"""`mrl doctor`: what is installed, and which engines, backends and sandboxes work here, by trying them."""

from mrl.doctor.probes import PROBES, Probe
from mrl.doctor.render import render
from mrl.doctor.report import Check, Package, Report, diagnose

__all__ = ["PROBES", "Check", "Package", "Probe", "Report", "diagnose", "render"]
