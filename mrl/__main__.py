"""`python -m mrl` is the command `mrl`, for launchers that start modules: `torchrun -m mrl train …`."""

from mrl.cli.main import main

if __name__ == "__main__":
    main()
