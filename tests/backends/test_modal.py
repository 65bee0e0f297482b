"""What is refused before Modal is asked, and what containers do to each other's files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.backends import Resources, check_backend
from mrl.backends.modal import ModalBackend
from mrl.backends.modal.backend import gpu_option
from mrl.backends.modal.gpus import modal_gpu
from mrl.backends.modal.settings import Settings
from mrl.backends.modal.storage import STORAGE, digest_of
from mrl.backends.modal.writer import STALE_SECONDS, Writer
from mrl.errors import ConfigError, StoreError
from mrl.system import shared_disk
from tests.backends.workers import Worker


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [("A10G", 1, "A10"), ("a100-80gb", 4, "A100-80GB:4"), ("H100!", 1, "H100!"), ("A10", 4, "A10:4")],
)
def test_types_of_gpu(kind: str, number: int, expected: str) -> None:
    assert modal_gpu(kind, number) == expected


def test_a_type_that_modal_has_not_and_more_than_fit() -> None:
    with pytest.raises(ConfigError, match=r"Modal has no GPU of type 'H900'; did you mean H[12]00 or H[12]00\?"):
        modal_gpu("H900", 1)
    with pytest.raises(ConfigError, match=r"A10G:8 is more than the 4 of this type that a container"):
        modal_gpu("A10G", 8)


def test_ranks_share_a_container_and_none_is_rented_for_the_cpu() -> None:
    rank = Resources("A100", 1, env={"RANK": "1", "WORLD_SIZE": "4"})
    assert gpu_option(rank, "actor", 4) == "A100:4"
    assert gpu_option(Resources("any", 1), "actor", 1) == "A100"
    assert gpu_option(Resources("any", 1), "rollout", 1) == "A10"
    assert gpu_option(Resources(), "rollout", 1) is None


def test_an_actor_over_several_containers() -> None:
    ranks = [Resources("H100", 1, env={"RANK": str(rank), "WORLD_SIZE": "16"}) for rank in range(16)]
    with pytest.raises(ConfigError, match=r"H100:16 is more than the 8 .*backend_options: \{actor_nodes: 2\}"):
        check_backend("modal", {}, ranks)
    with pytest.raises(ConfigError, match=r"actor_nodes is 3, and the actor's 16 ranks are not as many in each"):
        check_backend("modal", {"actor_nodes": 3}, ranks)
    with pytest.raises(ConfigError, match=r"actor_nodes is 2, and the actor has one rank; .* actor_gpu: H100:16"):
        check_backend("modal", {"actor_nodes": 2}, [Resources("H100", 1)])
    with pytest.raises(ConfigError, match=r"actor_nodes is 0; give a number from 1 to 32"):
        check_backend("modal", {"actor_nodes": 0}, ranks)
    prices = [ModalBackend(1.0, actor_nodes=2).price("actor-3", needs) for needs in ranks]
    assert sum(prices) == pytest.approx(2 * ModalBackend(1.0).price("actor-0", replace_world(ranks[0], 8)) * 8)


def replace_world(needs: Resources, ranks: int) -> Resources:
    return replace(needs, env={**needs.env, "WORLD_SIZE": str(ranks)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secrets": "hf"}, r"backend_options: secrets is 'hf'; give a list of names"),
        ({"app": ""}, r"backend_options: app is ''; give a name"),
        ({"concurrent_inputs": 0}, r"concurrent_inputs is 0; give a number from 1 to 1000"),
        ({"loop": "moon"}, r"loop is 'moon'; give auto, here, modal"),
        ({"memory_mb": "much"}, r"memory_mb is 'much'; give a whole number from 128"),
        ({"detach": "yes"}, r"detach is 'yes'; give true or false"),
        ({"volumes": "x"}, r"backend 'modal' has no option 'volumes'; it has app, volume, secrets"),
    ],
)
def test_options_that_will_not_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend("modal", options, [])


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_MODAL", '{"app": "mine", "secrets": ["hf"]}')
    assert Settings.from_environment() == Settings(app="mine", secrets=("hf",))
    assert ModalBackend(1.0, volume="v").settings == Settings(app="mine", secrets=("hf",), volume="v")
    monkeypatch.setenv("MRL_MODAL", "mine")
    with pytest.raises(ConfigError, match=r"MRL_MODAL: 'mine' is no JSON .*; give e\.g\."):
        Settings.from_environment()
    monkeypatch.setenv("MRL_MODAL", '{"name": "mine"}')
    with pytest.raises(ConfigError, match=r"MRL_MODAL: there is no 'name' among the app's settings; there are app"):
        Settings.from_environment()


def test_contents_decide_what_is_sent_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / name / "in" / "file").write_text("1")
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")
    (tmp_path / "b" / "in" / "file").rename(tmp_path / "b" / "in" / "other")
    assert digest_of(tmp_path / "a") != digest_of(tmp_path / "b")


class Scribe(Worker):
    """Writes to the Volume, and reads what another one has written there while it has a file there open."""

    def write(self, name: str, text: str) -> None:
        path = STORAGE / "data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        shared_disk.commit(path)

    def read_with_one_open(self, opened: str, name: str, target: str) -> str:
        with (STORAGE / "data" / opened).open() as file:
            assert shared_disk.bring(STORAGE / "data" / name, Path(target))
            assert not shared_disk.bring(STORAGE / "data" / "nowhere", Path(f"{target}-2"))
            return Path(target).read_text() + file.read()


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
async def test_what_one_container_commits_another_one_brings() -> None:
    """Also while it cannot bring its mount up to date."""
    backend = ModalBackend(60.0)
    try:
        one, two = [
            await backend.spawn(Scribe, name=f"rollout-{index}", resources=Resources(), args={}) for index in range(2)
        ]
        await two.call("write", "mine", "open")
        await one.call("write", "yours", "new ")
        assert await two.call("read_with_one_open", "mine", "yours", "/tmp/brought") == "new open"
    finally:
        await backend.close()


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
async def test_what_is_missing_at_modal_is_said_before_anything_starts() -> None:
    for options, message in (
        ({"secrets": ["mrl-no-such-secret"]}, r"no secret 'mrl-no-such-secret' .* `modal secret create mrl-no-such-"),
        ({"volume": "mrl-no-such-volume"}, r"no Volume 'mrl-no-such-volume' .* `modal volume create mrl-no-such-"),
    ):
        backend = ModalBackend(60.0, **options)
        with pytest.raises(ConfigError, match=message):
            await backend.reserve({})
        await backend.close()


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
def test_a_run_on_the_volume_has_one_writer() -> None:
    """Also where the loop's container is followed by another; until nothing is heard of it for a while."""
    mine, again, other = (Writer("mrl-storage", "r", session, "process 1 on x") for session in ("a", "a", "b"))
    other.refuse()  # nobody writes
    mine.take()
    again.take()
    for refused in (other.refuse, other.take):
        with pytest.raises(StoreError, match=r"'r' .* of process 1 on x, last seen \d+ s ago; .* after 60 s"):
            refused()
    other.release()  # not its own
    assert mine.stay()
    with mine._entries() as entries:
        entries.put("r", entries.get("r") | {"time": time.time() - STALE_SECONDS})
    other.take()
    assert not mine.stay()
    mine.release()
    assert other.stay()
    other.release()
    mine.take()
