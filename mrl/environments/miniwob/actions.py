"""What the policy may do on a page, in BrowserGym's form: `click('12')`, `fill('5', 'text')`, `noop()`.

An action is one call. It is parsed, never executed: a name of this table and constants.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

LONGEST = 10_000
"""Characters of an action."""
PATIENCE = 10_000.0
"""Milliseconds that the browser may take for an action. What cannot be done is told at once, without waiting whether it
can be later: on a busy machine that would depend on it."""

MOMENT = 500.0
"""Milliseconds that pass in the page with an action."""

LONGEST_WAIT = 60_000.0

Action = Callable[["Page"], Awaitable[float | None]]
"""Does it. Returns how long it takes in the page, where that is not a moment."""


def parse(text: str) -> Action:
    """What the text says. Raises ValueError for what is no action, saying what is."""
    if len(text) > LONGEST:
        raise ValueError(f"an action of {len(text)} characters is too long")
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{text[:200]!r} is not one call; e.g. click('12')") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in ACTIONS:
        raise ValueError(f"{text[:200]!r} is not one of {', '.join(map(signature, ACTIONS))}")
    name = call.func.id
    try:
        args = [_constant(one) for one in call.args]
        kwargs = {str(keyword.arg): _constant(keyword.value) for keyword in call.keywords}
        bound = inspect.signature(ACTIONS[name]).bind(None, *args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{signature(name)}: {error}") from None
    for key, value in bound.arguments.items():
        if key != "page" and not isinstance(value, _TYPES[key]):
            raise ValueError(f"{signature(name)}: {key} cannot be {value!r}")
    return lambda page: ACTIONS[name](page, *args, **kwargs)


def signature(name: str) -> str:
    """An action as it is written."""
    return f"{name}({', '.join(list(inspect.signature(ACTIONS[name]).parameters)[1:])})"


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise TypeError("arguments are plain texts, numbers or lists of texts") from None


async def _element(page: Page, bid: str | int) -> Locator:
    if not re.fullmatch("[0-9]{1,9}", str(bid)):
        raise ValueError(f"{bid!r} is not a number that is shown in brackets")
    found = page.locator(f'[data-mrl="{bid}"]')
    if await found.count() == 0:
        raise ValueError(f"there is no element [{bid}]")
    if not await found.is_visible():
        raise ValueError(f"the element [{bid}] is not visible")
    return found


async def _editable(page: Page, bid: str | int) -> Locator:
    found = await _element(page, bid)
    if not await found.is_editable():
        raise ValueError(f"the element [{bid}] cannot be edited")
    return found


async def click(page: Page, bid: str, button: str = "left") -> None:
    await (await _element(page, bid)).click(
        button=_one_of(button, "left", "middle", "right"), force=True, timeout=PATIENCE
    )


async def dblclick(page: Page, bid: str) -> None:
    await (await _element(page, bid)).dblclick(force=True, timeout=PATIENCE)


async def hover(page: Page, bid: str) -> None:
    await (await _element(page, bid)).hover(force=True, timeout=PATIENCE)


async def focus(page: Page, bid: str) -> None:
    await (await _element(page, bid)).focus(timeout=PATIENCE)


async def fill(page: Page, bid: str, value: str) -> None:
    await (await _editable(page, bid)).fill(value, timeout=PATIENCE)


async def clear(page: Page, bid: str) -> None:
    await (await _editable(page, bid)).clear(timeout=PATIENCE)


async def press(page: Page, bid: str, key_comb: str) -> None:
    await (await _element(page, bid)).press(key_comb, timeout=PATIENCE)


async def select_option(page: Page, bid: str, options: str | list[str]) -> None:
    found = await _editable(page, bid)
    known = await found.evaluate("element => [...element.options ?? []].flatMap(one => [one.value, one.label])")
    for option in [options] if isinstance(options, str) else options:
        if option not in known:
            raise ValueError(f"the element [{bid}] has no option {option!r}")
    await found.select_option(options, timeout=PATIENCE)


async def drag_and_drop(page: Page, from_bid: str, to_bid: str) -> None:
    await (await _element(page, from_bid)).drag_to(await _element(page, to_bid), force=True, timeout=PATIENCE)


async def scroll(page: Page, delta_x: float, delta_y: float) -> None:
    await page.mouse.wheel(delta_x, delta_y)


async def mouse_click(page: Page, x: float, y: float) -> None:
    await page.mouse.click(x, y)


async def mouse_drag_and_drop(page: Page, from_x: float, from_y: float, to_x: float, to_y: float) -> None:
    await page.mouse.move(from_x, from_y)
    await page.mouse.down()
    await page.mouse.move(to_x, to_y, steps=4)
    await page.mouse.up()


async def keyboard_type(page: Page, text: str) -> None:
    await page.keyboard.type(text)


async def keyboard_press(page: Page, key: str) -> None:
    await page.keyboard.press(key)


async def noop(page: Page, wait_ms: float = MOMENT) -> float:
    return min(max(wait_ms, 0.0), LONGEST_WAIT)


def _one_of(value: str, *known: str) -> Any:
    if value not in known:
        raise ValueError(f"{value!r} is not one of {', '.join(known)}")
    return value


ACTIONS: dict[str, Callable[..., Awaitable[float | None]]] = {
    action.__name__: action
    for action in (
        *(click, dblclick, hover, focus, fill, clear, press, select_option, drag_and_drop, scroll),
        *(mouse_click, mouse_drag_and_drop, keyboard_type, keyboard_press, noop),
    )
}
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("bid", "from_bid", "to_bid"), (str, int)),
    **dict.fromkeys(("value", "key_comb", "text", "key", "button"), str),
    **dict.fromkeys(("x", "y", "from_x", "from_y", "to_x", "to_y", "delta_x", "delta_y", "wait_ms"), (int, float)),
    "options": (str, list),
}
"""Of arguments, by their name."""
