"""An OpenNebula front end without OpenNebula, in which its drivers' scripts run as its own driver processes run them.

    with Frontend(folder, {"host-1": Host(socket)}) as frontend, driver_of(frontend) as driver:
        one = Oned(frontend, driver)
        vm = one.instantiate([Disk(...)], "host-1")

With ONE_SOURCE set to OpenNebula's source tree the same is done by its own programs: ``kinds_of_driver`` tells which
there are. What stands in for a program lies in programs/ and remotes/. Hosts are mount namespaces: needs root.
"""

from __future__ import annotations

from lab.opennebula.driver import Answer, Driver, PythonDriver
from lab.opennebula.exchange import Call, Exchange, Fate, Fault
from lab.opennebula.frontend import Frontend, Host, one_source
from lab.opennebula.oned import Oned
from lab.opennebula.pool import Datastore, Disk, History, Image, Vm
from lab.opennebula.rubydriver import RubyDriver, driver_of, kinds_of_driver
from lab.opennebula.scheduler import Carried, Pace, Plan, carry_out

__all__ = [
    "Answer",
    "Call",
    "Carried",
    "Datastore",
    "Disk",
    "Driver",
    "Exchange",
    "Fate",
    "Fault",
    "Frontend",
    "History",
    "Host",
    "Image",
    "Oned",
    "Pace",
    "Plan",
    "PythonDriver",
    "RubyDriver",
    "Vm",
    "carry_out",
    "driver_of",
    "kinds_of_driver",
    "one_source",
]
