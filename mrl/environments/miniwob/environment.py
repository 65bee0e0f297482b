"""A task of MiniWoB++ (arXiv 1802.08802) in a page of its own: a goal, a form to click and fill, a reward."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mrl.environments.base import playing, rows, seeded, setting
from mrl.environments.miniwob.actions import ACTIONS, MOMENT, parse, signature
from mrl.environments.miniwob.browser import Browser, find_chromium, shared
from mrl.errors import DataError, EnvError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

NEVER = 2**31 - 1
"""Milliseconds: the longest that a page's clock can be set to."""
BEGIN_SECONDS, ACT_SECONDS = 90.0, 30.0
"""Within which a page is there (the browser may have to start), and an action is done."""
TRIES = 100
"""How often a page is asked, in five seconds, before it counts as broken."""
SCREEN: Any = {"x": 0, "y": 0, "width": 160, "height": 210}
"""Where a task is, in pixels."""


class MiniWoB:
    """One web task. The policy sees the page as numbered elements, and acts on them by their numbers."""

    fields: ClassVar[dict[str, Any]] = {
        "goal": (str, ""),
        "page": (str, ""),
        "error": (str, ""),
        "screenshot": (str | None, None),
    }

    def __init__(
        self,
        task: str = "click-test",
        max_actions: int = 10,
        seconds: float | None = None,
        screenshots: bool = False,
        chromium: str | None = None,
    ) -> None:
        """task: e.g. click-button, enter-text, login-user. max_actions: after which it is over. seconds: the same by
        the page's clock, with the reward -1; None = never. That clock goes on by half a second with each action, and
        with `noop` as it says, however long the policy takes. screenshots: kept in `screenshot`, as base64 of a
        PNG, 160 by 210 pixels. chromium: its path, default the one that is found. Raises EnvError where there is none,
        or a package is missing."""
        _pages()
        find_chromium(chromium)
        self.defaults = (task, max_actions, seconds)
        self.screenshots, self.chromium = screenshots, chromium
        self.done, self.reward, self.failure = False, 0.0, ""
        self.goal = self.page = self.error = ""
        self.screenshot: str | None = None
        self._session: _Session | None = None

    def reset(
        self,
        seed: int | None = None,
        task: str | None = None,
        max_actions: int | None = None,
        seconds: float | None = None,
        **columns: Any,
    ) -> str:
        """The same `seed` is the same page. Raises DataError for a task there is not, EnvError without a browser."""
        name, self.left = setting(task, self.defaults[0]), setting(max_actions, self.defaults[1])
        self.seconds = setting(seconds, self.defaults[2])
        if not (_pages() / "miniwob" / f"{name}.html").is_file() or "/" in name:
            raise DataError(f"miniwob: there is no task {name!r} (there are {', '.join(task_names())})")
        number = seeded(seed, "")
        self.done, self.reward, self.failure = False, 0.0, ""
        clock = NEVER if self.seconds is None else int(MOMENT + self.seconds * 1000)
        self._take(self._begun(name, number, clock))
        actions = ", ".join(map(signature, ACTIONS))
        return f"\n{self.goal}\n\nActions: {actions}.\nThe page:\n{self.page}"

    def act(self, action_str: str) -> str:
        """
        Does one thing on the page and returns what is on it then.

        Args:
            action_str: One call, e.g. click('12'), fill('5', 'some text'), press('5', 'Enter') or noop().
        """
        playing(self.done)
        self.left -= 1
        self.error = ""
        try:
            action = parse(action_str)
        except ValueError as error:
            self.error, self.done = str(error), self.left <= 0
            return self._shown()
        assert self._session is not None
        try:
            seen = self._session.act(action, self.screenshots)
        except EnvError as error:
            self.failure, self.done = str(error), True
            raise
        self._take(seen)
        self.done = self.done or self.left <= 0
        return self._shown()

    def get_reward(self) -> float:
        """The page's own, from -1 to 1, without a discount for time; 0 while it has none. Raises EnvError when the
        browser broke off."""
        if self.failure:
            raise EnvError(self.failure)
        return self.reward

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset: three easy tasks by turns."""
        names = ("click-test", "click-button", "enter-text")
        made = rows("Do what is asked on a web page, with the tool `act`.", count, seed)
        return [row | {"task": names[number % len(names)]} for number, row in enumerate(made)]

    def __exit__(self, *reason: object) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> MiniWoB:
        return self

    # --- inner ------------------------------------------------------------------------------------------------------

    def _begun(self, task: str, seed: int, clock: int) -> dict[str, Any]:
        if self._session is not None and not self._session.broken:
            with contextlib.suppress(EnvError):  # the browser died since the last episode: this one gets another
                return self._session.begin(task, seed, clock, self.screenshots)
        self._session = _Session(shared(find_chromium(self.chromium), _pages()))
        return self._session.begin(task, seed, clock, self.screenshots)

    def _take(self, seen: dict[str, Any]) -> None:
        self.screenshot, self.error = seen.get("screenshot"), seen.get("error", "")
        if seen["left"]:
            self.error, self.done, self.reward = "the task's page was left", True, -1.0
            return
        self.goal, self.page = seen["goal"], seen["text"]
        self.done, self.reward = seen["done"], float(seen["reward"]) if seen["done"] else 0.0

    def _shown(self) -> str:
        error = f"error: {self.error}\n" if self.error else ""
        return f"{error}It is over." if self.done else f"{error}{self.page}"


class _Session:
    """A session's context in the shared browser. Every episode has a page that was loaded for it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.broken = False
        self.context: BrowserContext | None = None
        self.page: Page | None = None
        self._end: weakref.finalize[..., _Session] | None = None

    def close(self) -> None:
        """Ends it; also when nobody has it any more."""
        self.broken = True
        if self._end is not None:
            self._end()

    def begin(self, task: str, seed: int, clock: int, screenshot: bool) -> dict[str, Any]:
        """Loads the task's page and starts it."""

        async def work() -> dict[str, Any]:
            if self.context is None:
                self.context = await self.browser.session()
                self._end = weakref.finalize(self, self.browser.give_back, self.context)
                self._end.atexit = False  # the browser itself ends then
                await self.context.add_init_script(_script())
                self.page = await self.context.new_page()
                self.context.on("page", lambda other: other.close())  # what a page opens besides itself
            assert self.page is not None
            await self.page.goto(f"{self.browser.url}/miniwob/{task}.html", wait_until="load")
            await self.page.evaluate("([seed, clock]) => mrlBegin(seed, clock)", [seed % 2**53, clock])
            return await self._look(MOMENT, screenshot)

        return self._working(work, BEGIN_SECONDS)

    def act(self, action: Any, screenshot: bool) -> dict[str, Any]:
        """What is there after it; with `error` where it could not be done."""
        from playwright.async_api import Error

        async def work() -> dict[str, Any]:
            error, passes = "", None
            try:
                passes = await action(self.page)
            except (Error, ValueError) as failed:  # whether it is the browser that failed shows in the next line
                error = str(failed).split("\nCall log")[0].splitlines()[0]
            seen = await self._look(MOMENT if passes is None else passes, screenshot)
            return seen | {"error": error} if error else seen

        return self._working(work, ACT_SECONDS)

    async def _look(self, passes: float, screenshot: bool) -> dict[str, Any]:
        assert self.page is not None
        seen = await self._asked("passes => window.mrlLook ? mrlLook(passes) : {left: true}", passes)
        if screenshot:
            seen["screenshot"] = base64.b64encode(await self.page.screenshot(clip=SCREEN)).decode()
        return seen

    async def _asked(self, script: str, argument: float) -> dict[str, Any]:
        """What the page answers, or the next one: while that is being loaded there is none to ask."""
        from playwright.async_api import Error

        assert self.page is not None
        answer: dict[str, Any] | None = None
        tries = 0
        while answer is None:
            try:
                answer = await self.page.evaluate(script, argument)
            except Error:
                tries += 1
                if self.page.is_closed() or tries == TRIES:
                    raise
                await asyncio.sleep(0.05)
        return answer

    def _working(self, work: Any, seconds: float) -> dict[str, Any]:
        from playwright.async_api import Error

        try:
            return self.browser.run(work, seconds)
        except Error as error:
            self.close()
            raise EnvError(f"the browser broke off: {str(error).splitlines()[0]}") from error
        except BaseException:
            self.close()
            raise


def task_names() -> list[str]:
    """All tasks that there are."""
    return sorted(path.stem for path in (_pages() / "miniwob").glob("*.html"))


@cache
def _script() -> str:
    return (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


@cache
def _pages() -> Path:
    """The tasks' folder in the package `miniwob`, which is not imported: it would load Selenium."""
    try:
        folder = Path(str(distribution("miniwob").locate_file("miniwob/html")))
        distribution("playwright")
    except PackageNotFoundError as error:
        raise EnvError(f"miniwob: {error}; install what it needs with `pip install 'mrl[miniwob]'`") from None
    return folder
