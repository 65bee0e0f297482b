"""The Modal app, for `modal deploy mrl/app.py` and for apps of your own (`app.include`).

Its settings are read from the environment variable MRL_MODAL, a JSON object: docs/modal.md.
"""

from mrl.backends.modal.app import app, volume

__all__ = ["app", "volume"]
