"""Runs a script of the drivers: ``run.py tm|datastore SCRIPT ARGUMENT…``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the installer put the package beside this file

from opennebula_tm.driver.main import main  # noqa: E402

sys.exit(main(sys.argv[1:], remotes=HERE.parents[1]))
