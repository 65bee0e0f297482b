"""What a container of Modal's costs: a table that comes with mrl, and what a user's own file says instead."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mrl.backends.modal.gpus import GPUS
from mrl.errors import ConfigError

SHIPPED = Path(__file__).with_name("prices.yaml")
OWN_FILE = "~/.config/mrl/prices.yaml"
"""Read where it is there and no other is named ($XDG_CONFIG_HOME instead of `~/.config`, where that is set)."""
BACKEND = "modal"
"""The file's key; a user's may hold other backends' tables beside it."""
ENTRIES = ("gpu", "cpu_core", "memory_gib", "source", "date")


@dataclass(frozen=True)
class Prices:
    """Dollars per hour: of a GPU by its canonical type, of a physical core, of a GiB of memory."""

    gpu: Mapping[str, float]
    cpu_core: float
    memory_gib: float

    def per_hour(self, gpu: str | None, cpus: float, memory_mb: int | None) -> float:
        """Dollars per hour of one container. gpu: as Modal takes it, `A100-80GB:4`. memory_mb: None = none is asked
        for, and none counted."""
        kind, _, number = (gpu or "").partition(":")
        gpus = self.gpu[kind] * int(number or 1) if kind else 0.0
        return gpus + cpus * self.cpu_core + (memory_mb or 0) / 1024 * self.memory_gib


def load_prices(file: str | None = None) -> Prices:
    """The shipped table with the entries of a user's file in their place. file: the backend option `prices`; None =
    `~/.config/mrl/prices.yaml`, if it is there. Raises ConfigError for a file or an entry that will not do."""
    shipped = _changed(Prices({}, 0.0, 0.0), _read(SHIPPED), SHIPPED)
    own = own_prices(file)
    return shipped if own is None else _changed(shipped, _read(own), own)


def own_prices(file: str | None) -> Path | None:
    """The user's file; None = there is none. file: as for `load_prices`."""
    own = _own_file() if file is None else Path(file).expanduser()
    return None if file is None and not own.is_file() else own


def _own_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME")
    return Path(folder, "mrl", "prices.yaml") if folder else Path(OWN_FILE).expanduser()


def _read(file: Path) -> dict[str, Any]:
    """A file's table for Modal; empty where it has none."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prices: {file} cannot be read ({error}); name a YAML file with prices") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"prices: {file} is no YAML ({' '.join(str(error).split())}); docs/cost.md has one") from None
    table = found.get(BACKEND, {}) if isinstance(found, dict) else None
    if not isinstance(table, dict) or not found:
        raise ConfigError(f"prices: {file} has no table `{BACKEND}:`; write e.g. {{modal: {{gpu: {{H100: 3.95}}}}}}")
    return table


def _changed(prices: Prices, table: dict[str, Any], file: Path) -> Prices:
    for name in table:
        if name not in ENTRIES:
            raise ConfigError(f"prices: {file}: {BACKEND}.{name} is no entry; there are {', '.join(ENTRIES)}")
    gpus = table.get("gpu", {})
    if not isinstance(gpus, dict):
        raise ConfigError(
            f"prices: {file}: {BACKEND}.gpu is {gpus!r}; give types with their price, e.g. {{H100: 3.95}}"
        )
    for kind in gpus:
        if kind not in GPUS:
            raise ConfigError(
                f"prices: {file}: {BACKEND}.gpu.{kind} is no type of Modal's; there are {', '.join(GPUS)}"
            )
    own = {kind: _price(value, f"gpu.{kind}", file) for kind, value in gpus.items()}
    rest = {name: _price(table[name], name, file) for name in ("cpu_core", "memory_gib") if name in table}
    return replace(prices, gpu={**prices.gpu, **own}, **rest)


def _price(value: Any, entry: str, file: Path) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"prices: {file}: {BACKEND}.{entry} is {value!r}; give dollars per hour, e.g. 3.95")
    return float(value)
