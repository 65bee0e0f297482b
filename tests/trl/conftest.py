"""TRL's own scripts are run where there is a folder with them; else nothing is skipped for it."""

import os

collect_ignore = [] if os.environ.get("MRL_TRL_EXAMPLES") else ["test_scripts.py"]
