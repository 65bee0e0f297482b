"""Modal's types of GPU and what they cost, by the shipped table and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.backends import Resources
from mrl.backends.inline import InlineBackend
from mrl.backends.modal import ModalBackend
from mrl.backends.modal.gpus import GPUS, modal_gpu
from mrl.backends.modal.prices import load_prices
from mrl.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's own table would be."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mrl").mkdir()
    return tmp_path / "mrl" / "prices.yaml"


def test_types_are_known_in_any_case() -> None:
    assert modal_gpu("a100-80gb", 4) == "A100-80GB:4"
    assert modal_gpu("A10G", 1) == modal_gpu("a10", 1) == "A10"
    assert modal_gpu("h100!", 8) == "H100!:8"
    with pytest.raises(ConfigError, match=r"actor_gpu and rollout_gpu.*'H1000'; did you mean H100"):
        modal_gpu("H1000", 1)
    with pytest.raises(ConfigError, match="more than the 4"):
        modal_gpu("A10G", 5)


def test_every_type_has_a_price() -> None:
    prices = load_prices()
    assert set(prices.gpu) == set(GPUS)
    assert all(value > 0 for value in (*prices.gpu.values(), prices.cpu_core, prices.memory_gib))


def test_a_worker_costs_its_gpus_processors_and_memory() -> None:
    prices = load_prices()
    assert prices.per_hour("H100:2", 4.0, 2048) == pytest.approx(2 * 3.9492 + 4 * 0.04716 + 2 * 0.007992)
    assert prices.per_hour(None, 0.0, None) == 0.0


def test_what_the_backend_would_rent_is_what_it_prices() -> None:
    backend = ModalBackend(60.0)
    assert backend.price("rollout-0", Resources("any", 1)) == pytest.approx(1.1016 + 0.04716)
    assert backend.price("actor", Resources("any", 1)) == pytest.approx(2.0988 + 0.04716)
    assert backend.price("actor", Resources(cpus=2)) == pytest.approx(2 * 0.04716)
    assert backend.price("reward-0", Resources()) == 0.0
    assert InlineBackend(60.0).price("actor", Resources("any", 1)) is None


def test_ranks_share_a_container_and_its_memory() -> None:
    backend = ModalBackend(60.0, memory_mb=4096)
    ranks = [Resources("H100", 1, cpus=1.0, env={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    together = sum(backend.price(f"actor-{rank}", needs) for rank, needs in enumerate(ranks))
    assert together == pytest.approx(load_prices().per_hour("H100:2", 2.0, 4096))


def test_a_users_entries_take_the_place_of_those_shipped(home: Path, tmp_path: Path) -> None:
    home.write_text("modal: {gpu: {H100: 2}, cpu_core: 0}\nother: {whatever: 1}\n")
    assert load_prices().per_hour("H100:2", 8.0, None) == 4.0
    assert load_prices().gpu["T4"] == 0.5904
    other = tmp_path / "other.yaml"
    other.write_text("modal: {gpu: {H100: 1}}\n")
    assert ModalBackend(60.0, prices=str(other)).price("actor", Resources("H100", 1)) == pytest.approx(1.04716)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modal: {gpu: {H10: 2}}", "modal.gpu.H10 is no type of Modal's; there are T4, "),
        ("modal: {gpu: {H100: free}}", "modal.gpu.H100 is 'free'; give dollars per hour, e.g. 3.95"),
        ("modal: {gpu: {H100: .nan}}", "modal.gpu.H100 is nan"),
        ("modal: {gpu: {H100: true}}", "modal.gpu.H100 is True"),
        ("modal: {cpu_core: -1}", "modal.cpu_core is -1"),
        ("modal: {gpu: 3}", "modal.gpu is 3; give types with their price"),
        ("modal: {gpus: {}}", "modal.gpus is no entry; there are gpu, cpu_core"),
        ("[1]", "has no table `modal:`"),
        ("", "has no table `modal:`"),
        ("modal: [", "is no YAML"),
    ],
)
def test_a_bad_table_is_refused(home: Path, text: str, said: str) -> None:
    home.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_prices()
    assert str(caught.value).startswith(f"prices: {home}")
    assert said in str(caught.value)


def test_a_named_table_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prices: .*nowhere\.yaml cannot be read"):
        ModalBackend(60.0, prices=str(tmp_path / "nowhere.yaml"))
