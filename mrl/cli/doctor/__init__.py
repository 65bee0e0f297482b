"""`mrl doctor`: what is installed, and which engines, backends and sandboxes work here, by trying them."""

from mrl.cli.doctor.probes import PROBES, Probe
from mrl.cli.doctor.render import render
from mrl.cli.doctor.report import Check, Package, Report, diagnose

__all__ = ["PROBES", "Check", "Package", "Probe", "Report", "diagnose", "render"]
