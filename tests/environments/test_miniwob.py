"""MiniWoB++ in a real Chromium: oracles that solve tasks, seeds, many sessions, a browser that dies, no network."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import psutil
import pytest

from mrl.environments.miniwob.browser import find_chromium
from mrl.environments.miniwob.environment import MiniWoB, task_names
from mrl.errors import DataError, EnvError
from tests.environments.test_serve import client, served

pytestmark = pytest.mark.browser


@pytest.fixture
def web() -> Iterator[MiniWoB]:
    with MiniWoB() as environment:
        yield environment


def numbered(page: str, role: str, text: str = "") -> list[str]:
    """The numbers of the elements of a role, with a text where one is given."""
    wanted = rf"\[(\d+)\] {role}\b" + (rf' "{re.escape(text)}"' if text else "")
    return re.findall(wanted, page)


def click_test(goal: str, page: str) -> list[str]:
    return [f"click('{numbered(page, 'button')[0]}')"]


def click_button(goal: str, page: str) -> list[str]:
    return [f"click('{numbered(page, 'button', goal.split(chr(34))[1])[0]}')"]


def enter_text(goal: str, page: str) -> list[str]:
    text = goal.split('"')[1]
    return [f"fill('{numbered(page, 'textbox')[0]}', {text!r})", f"click('{numbered(page, 'button')[0]}')"]


def login_user(goal: str, page: str) -> list[str]:
    _, user, _, password, _ = goal.split('"')
    boxes = numbered(page, "textbox")
    return [f"fill('{boxes[0]}', {user!r})", f"fill('{boxes[1]}', {password!r})", f"press('{boxes[1]}', 'Tab')",
            f"click('{numbered(page, 'button')[0]}')"]  # fmt: skip


def choose_list(goal: str, page: str) -> list[str]:
    wanted = re.fullmatch(r"Select (.*) from the list and click Submit\.", goal)
    assert wanted
    return [
        f"select_option('{numbered(page, 'combobox')[0]}', {wanted[1]!r})",
        f"click('{numbered(page, 'button')[0]}')",
    ]


def click_checkboxes(goal: str, page: str) -> list[str]:
    named = re.fullmatch(r"Select (.*) and click Submit\.", goal)
    assert named
    boxes = numbered(page, "checkbox")
    labels = re.findall(r'\[\d+\] label "(.*)"', page)
    wanted = [] if named[1] == "nothing" else named[1].split(", ")
    return [f"click('{boxes[labels.index(text)]}')" for text in wanted] + [f"click('{numbered(page, 'button')[0]}')"]


ORACLES: dict[str, Callable[[str, str], list[str]]] = {
    "click-test": click_test,
    "click-button": click_button,
    "enter-text": enter_text,
    "login-user": login_user,
    "choose-list": choose_list,
    "click-checkboxes": click_checkboxes,
}


@pytest.mark.parametrize("task", ORACLES)
def test_an_oracle_solves_it(web: MiniWoB, task: str) -> None:
    for seed in range(2):
        web.reset(seed=seed, task=task)
        for action in ORACLES[task](web.goal, web.page):
            assert not web.done, action
            assert web.get_reward() == 0.0
            web.act(action)
            assert not web.error
        assert web.done
        assert web.get_reward() > 0


def test_doing_nothing_is_worth_nothing(web: MiniWoB) -> None:
    """By the number of actions 0, by the page's clock -1."""
    web.reset(seed=1, task="click-button", max_actions=2)
    assert "button" in web.act("noop(0)")
    assert web.act("noop(0)") == "It is over."
    assert (web.done, web.get_reward()) == (True, 0.0)
    with pytest.raises(ValueError, match="over"):
        web.act("noop(0)")
    web.reset(seed=1, task="click-button", seconds=1.5)
    web.act("noop()")
    assert not web.done
    web.act("noop(wait_ms=1000)")
    assert (web.done, web.get_reward()) == (True, -1.0)


def test_the_wrong_button_is_worth_less(web: MiniWoB) -> None:
    web.reset(seed=3, task="click-button")
    wrong = next(one for one in numbered(web.page, "button") if f"'{one}'" not in click_button(web.goal, web.page)[0])
    web.act(f"click('{wrong}')")
    assert (web.done, web.get_reward()) == (True, -1.0)


@pytest.mark.parametrize("task", ["email-inbox", "order-food", "click-pie", "chase-circle"])
def test_a_seed_is_one_page(web: MiniWoB, task: str) -> None:
    with MiniWoB(task) as other:
        seen = [web.reset(seed=seed, task=task) for seed in (1, 2, 1)]
        assert seen[0] == seen[2] != seen[1]
        other.reset(seed=9)
        assert other.reset(seed=1) == seen[0]
        assert web.get_reward() == 0.0


def test_actions_that_do_not_work_are_told(web: MiniWoB) -> None:
    web.reset(seed=3, task="enter-text")
    before = web.page
    for action, reason in {
        "click('999')": "there is no element [999]",
        "import os": "is not one call",
        "goto('http://example.com')": "is not one of click(bid, button)",
        "fill('2', 'x')": "error",
        "select_option('1', 'x')": "no option 'x'",
        "press('1', 'NoSuchKey')": "Unknown key",
        "click('1', 'both')": "not one of left, middle, right",
    }.items():
        assert reason.lower() in web.act(action).lower(), action
        assert web.error
        assert web.page.replace(" focused", "") == before
    assert not web.act("fill('1', 'ok')").startswith("error")
    with pytest.raises(DataError, match="no task 'click-tset'"):
        web.reset(seed=1, task="click-tset")
    with pytest.raises(DataError, match="no task"):
        web.reset(seed=1, task="../flight/AA/wrapper")
    assert len(task_names()) > 100


def test_screenshots() -> None:
    with MiniWoB(screenshots=True) as web:
        web.reset(seed=1)
        assert web.screenshot is not None
        image = base64.b64decode(web.screenshot)
        assert image.startswith(b"\x89PNG")
        assert (int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")) == (160, 210)


def browsers() -> list[psutil.Process]:
    """The processes of this one that are a Chromium, and not one of a Chromium's own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "--headless" in " ".join(command) and not any(one.startswith("--type=") for one in command):
            found.append(process)
    return found


def solve(web: MiniWoB, task: str, seed: int) -> float:
    web.reset(seed=seed, task=task)
    for action in ORACLES[task](web.goal, web.page):
        web.act(action)
    return web.get_reward()


def test_many_sessions_in_one_browser() -> None:
    together = threading.Barrier(8)

    def play(number: int) -> float:
        with MiniWoB() as web:
            web.reset(seed=number)
            together.wait()  # all eight have a page
            assert len(browsers()) == 1
            return solve(web, list(ORACLES)[number % 3], number)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [1.0] * 8


def test_a_browser_that_dies_fails_what_was_running_and_no_more() -> None:
    with MiniWoB() as one, MiniWoB() as two, MiniWoB() as idle:
        for web in (one, two):
            web.reset(seed=1, task="enter-text")
        assert solve(idle, "click-test", 1) == 1.0
        (running,) = browsers()
        running.kill()
        running.wait(10)
        for web in (one, two):
            with pytest.raises(EnvError, match="the browser"):
                web.act("noop(0)")
            with pytest.raises(EnvError, match="the browser"):
                web.get_reward()
        assert idle.get_reward() == 1.0
        assert [solve(web, "click-button", 2) for web in (one, two, idle)] == [1.0] * 3
        assert len(browsers()) == 1


def evaluated(web: MiniWoB, script: str) -> Any:
    """By a script of ours in its page."""
    session: Any = web._session
    return session.browser.run(lambda: session.page.evaluate(script), 20)


def test_a_page_that_is_left_is_the_end(web: MiniWoB) -> None:
    """Whether the next one is there already or not. What opens beside it is closed."""
    for elsewhere in ("location.reload()", "location.href = '/miniwob/click-button.html'"):
        web.reset(seed=1)
        evaluated(web, "window.open('/miniwob/click-button.html') && 0")
        assert not web.done
        evaluated(web, f"setTimeout(() => {{ {elsewhere} }}, 400) && 0")
        web.act("noop()")
        if not web.done:
            web.act("noop()")
        assert (web.done, web.error, web.get_reward()) == (True, "the task's page was left", -1.0)
    session: Any = web._session
    assert len(session.context.pages) == 1


def test_nothing_but_the_pages_can_be_reached(web: MiniWoB) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    web.reset(seed=1)

    def evaluate(script: str) -> Any:
        return evaluated(web, script)

    reached = "url => fetch(url, {mode: 'no-cors'}).then(() => true, () => false)"
    elsewhere = [
        f"http://127.0.0.1:{server.server_port}/",
        f"http://localhost:{server.server_port}/",
        "http://example.com/",
    ]
    try:
        for url in elsewhere:
            assert evaluate(f"({reached})({url!r})") is False
        socket = f"ws://127.0.0.1:{server.server_port}/"
        assert (
            evaluate(
                f"new Promise(done => {{ const s = new WebSocket({socket!r}); s.onerror = () => done('no'); "
                "s.onopen = () => done('yes') })"
            )
            == "no"
        )
        assert evaluate(f"({reached})('/core/core.js')") is True
    finally:
        server.shutdown()
        server.server_close()
    assert asked == []


def test_without_chromium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvError, match="apt-get install chromium"):
        find_chromium()
    monkeypatch.setenv("MRL_CHROMIUM", "/nowhere/chromium")
    with pytest.raises(EnvError, match="no /nowhere/chromium here"):
        MiniWoB().reset(seed=1)


def test_served_to_eight_clients_of_openenv() -> None:
    together = threading.Barrier(8)

    def play(number: int) -> float:
        task = ("click-button", "enter-text")[number % 2]
        with client(url) as web:
            seen = web.reset(seed=number, task=task)
            assert seen.observation["goal"] in seen.observation["text"]
            together.wait()
            total = 0.0
            for action in ORACLES[task](seen.observation["goal"], seen.observation["page"]):
                result = web.step({"action_str": action})
                total += result.reward
            assert result.done
            assert len(browsers()) == 1
            return total

    with served(MiniWoB, "miniwob") as url, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [1.0] * 8
