"""Programs on machines apart: the isolation of this package, carried to machines that somebody rents out.

`Machine` is what a service has to offer (start a command, bytes both ways); `MachineExecutor` does the rest. `modal` is
the member that is there; another service (E2B's, a cluster's, a virtual machine) is one small class.
"""

from mrl.sandbox.machines.base import Machine, OpenMachine
from mrl.sandbox.machines.executor import MachineExecutor

__all__ = ["Machine", "MachineExecutor", "OpenMachine"]
