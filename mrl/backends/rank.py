"""One of the actor's processes, as torchrun starts it: see mrl.backends.torchrun."""

import os

from mrl.backends.torchrun import DRIVER, be_rank

if __name__ == "__main__":
    be_rank(os.environ[DRIVER])
