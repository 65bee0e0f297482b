"""`modal`: every worker is a container at Modal (https://modal.com), rented by the second."""

from mrl.backends.modal.backend import ModalBackend

__all__ = ["ModalBackend"]
