"""The page in a real Chromium: every view opened, filtered, clicked; keys; light, dark and a phone; hostile text."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config import OrchestratorConfig
from mrl.environments.miniwob.browser import find_chromium
from mrl.logs.catalog import Catalog
from mrl.logs.report import write_report
from mrl.logs.serve import take_address
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Task
from tests.logs.conftest import client_of, groups_of

pytestmark = pytest.mark.browser

FLAGS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PHONE = {"width": 390, "height": 844}


PHONE_PATHS = (
    *("/", "/run/first", "/run/first/rollouts", "/run/first/rollout/30", "/run/first/rollout/30?view=tokens"),
    *("/run/first/group/train/3/0", "/run/first/events", "/run/first/config", "/run/first/tasks", "/run/first/evals"),
    *(
        "/evals",
        "/evals/diff?a=first@4&b=first@8",
        "/evals/diff/task?a=first@4&b=first@8&task=task/1",
        "/compare?run=first",
    ),
)


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """The page of the runs, on a port."""
    with served(Catalog(None, runs)) as address:
        yield address


@contextlib.contextmanager
def served(catalog: Catalog) -> Iterator[str]:
    import uvicorn

    from mrl.logs.app import create_app

    address = take_address("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(catalog), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]}, daemon=True)
    thread.start()
    yield address.url.rstrip("/")
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=list(FLAGS), chromium_sandbox=False, timeout=60_000
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    """A tab that fails the test when an error is logged, the policy refuses something, or another place is asked."""
    yield from tab(chromium, url)


def tab(chromium: Any, url: str, **options: Any) -> Iterator[Any]:
    context = chromium.new_context(
        base_url=url, viewport=options.pop("viewport", {"width": 1280, "height": 800}), **options
    )
    opened, wrong = context.new_page(), []
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request",
        lambda asked: wrong.append(asked.url) if not asked.url.startswith((url, "blob:", "data:", "file:")) else None,
    )
    yield opened
    context.close()
    assert not wrong


def test_from_the_runs_to_a_rollout_with_keys(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("j")
    assert page.locator("tr.selected").count() == 1
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/run/first")
    page.wait_for_selector("html[data-drawn]")
    page.keyboard.press("2")
    page.wait_for_url("**/run/first/rollouts")
    page.keyboard.press("n")
    page.wait_for_url(re.compile("after="))
    page.keyboard.press("p")
    page.wait_for_url(re.compile("before="))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/rollout/\d+"))
    at = page.url
    page.keyboard.press("n")
    page.wait_for_url(lambda there: there != at)
    page.keyboard.press("v")
    page.wait_for_url(re.compile("view=tokens"))
    page.locator(".tokens .t").nth(2).hover()
    assert "logprob -0.1" in page.locator("#tokenfact").inner_text()
    page.keyboard.press("g")
    page.wait_for_url(re.compile("/group/train/12/"))
    assert page.locator("article.attempt").count() == 4
    page.keyboard.press("?")
    assert page.locator("dialog[open]").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_curves_zoom_smooth_and_link(page: Any, url: str) -> None:
    page.goto("/run/first")
    page.wait_for_selector("html[data-drawn]")
    drawn = page.locator("figure.chart canvas").count()
    assert drawn == page.locator("figure.chart").count() >= 6
    box = page.locator("figure.chart .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"#x=\d+-\d+$"))
    page.locator("#smooth").fill("0.6")
    page.wait_for_url(re.compile("smooth=0.6"))
    linked = page.url
    page.goto("about:blank")
    page.goto(linked)
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("#smooth-shown").inner_text() == "0.60"
    assert page.locator("#unzoom").is_enabled()
    page.keyboard.press("0")
    page.wait_for_url(lambda there: "x=" not in there)
    assert "not finite at 5: nan" in page.locator("figure.chart", has_text="KL").first.inner_text()
    page.locator("#chart-filter").fill("kl")
    assert page.locator("figure.chart:visible").count() == 1
    page.locator("#chart-filter").fill("")
    page.locator("figure.chart .legend .item").first.click()
    assert page.locator(".legend .item.off").count() == 1
    box = page.locator("figure.chart .u-over").nth(1).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    page.locator(".legend a", has_text="rollouts of step").first.click()
    page.wait_for_url(re.compile(r"rollouts\?step=\d+"))
    with page.expect_download() as saved:
        page.goto("/run/first?y=reward/mean&x=train/kl#any")
        page.wait_for_selector("html[data-drawn]")
        page.locator("#any figure").hover()
        page.locator("#any .png").click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def rows_are(rows: Any, count: int) -> None:
    from playwright.sync_api import expect

    expect(rows).to_have_count(count)


def test_rollouts_are_filtered_without_a_reload(page: Any) -> None:
    from playwright.sync_api import expect

    page.goto("/run/first/rollouts")
    page.evaluate("window.kept = true")
    page.locator("[name=status]").select_option("failed")
    page.wait_for_url("**/rollouts?status=failed")
    rows = page.locator("tr[data-href]")
    rows_are(rows, 1)
    assert "SandboxError" in page.locator("tr[data-href]").inner_text()
    page.locator("[name=status]").select_option("")
    page.locator("#text").press_sequentially("answer 12.")
    rows_are(rows, 12)
    assert page.locator("#matches").inner_text() == "12 of 144 rollouts have"
    page.locator("#text").fill("print")
    expect(page.locator("#matches")).to_have_text("144 of 144 rollouts have")  # a page, and the rest counted
    rows_are(rows, 50)
    page.locator("tr.more").click()
    rows_are(rows, 100)
    page.locator("#text").fill("answer 12.")
    rows_are(rows, 12)
    assert page.evaluate("window.kept")
    page.reload()
    assert page.locator("tr[data-href]").count() == 12
    page.locator("[name=order]").select_option("reward")
    page.wait_for_url(re.compile("order=reward"))
    page.locator("tr[data-href] td").nth(3).click()
    page.wait_for_url(re.compile(r"/rollout/\d+\?.*order=reward"))
    page.locator("[data-view]", has_text="JSON").click()
    page.wait_for_url(re.compile("view=json"))
    assert '"completion_ids"' in page.locator("pre.raw").inner_text()


def test_comparing_and_evaluations(page: Any) -> None:
    page.goto("/")
    for box in page.locator("#runs input[type=checkbox]").all():
        box.check()
    page.keyboard.press("Escape")
    page.locator("#compare").click()
    page.wait_for_url(re.compile(r"/compare\?run=\w+&run=\w+"))
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("figure.chart .legend .item").first.inner_text().startswith(("first", "second"))
    assert page.locator("table.compare", has_text="learning_rate").first.is_visible()
    page.goto("/evals")
    page.locator("text=A against B").click()
    page.wait_for_url(re.compile("/evals/diff"))
    page.locator(".tally a", has_text="fixed").click()
    page.wait_for_url(re.compile("change=fixed"))
    assert set(page.locator("td .change").all_inner_texts()) == {"▲ fixed"}
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/evals/diff/task"))
    left, right = (box.bounding_box() for box in page.locator("article.attempt").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]  # side by side
    page.keyboard.press("g")
    page.wait_for_url(re.compile("/evals/diff[?]"))
    page.goto("/evals")
    page.locator("[name=by]").select_option("task")
    page.wait_for_url(re.compile("by=task"))
    for path in ("/run/first/tasks", "/run/first/events", "/run/first/config", "/run/first/evals"):
        page.goto(path)
        assert page.locator(".tabs .on").count() == 1
    page.goto("/run/first/task?id=task/1")
    page.wait_for_selector("html[data-drawn]")


def test_light_dark_and_a_phone(chromium: Any, url: str) -> None:
    def background(opened: Any) -> str:
        found: str = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    shades = []
    for scheme in ("light", "dark"):
        for opened in tab(chromium, url, color_scheme=scheme):
            opened.goto("/")
            shades.append(background(opened))
            opened.keyboard.press("t")
            shades.append(background(opened))
            opened.goto("/run/first")
            shades.append(background(opened))  # it is kept
    light, dark = shades[0], shades[3]
    assert shades == [light, dark, dark, dark, light, light]
    assert light != dark
    for opened in tab(chromium, url, viewport=PHONE, has_touch=True, is_mobile=True):
        for path in PHONE_PATHS:
            opened.goto(path)
            wide = opened.evaluate("document.documentElement.scrollWidth")
            assert wide <= PHONE["width"], f"{path} is {wide} wide"


def test_a_run_in_progress_moves(chromium: Any, tmp_path: Path) -> None:
    """From before it is there, as `--live` opens it: nobody has to reload."""
    folder = tmp_path / "moving"
    context = chromium.new_context()
    with served(Catalog([folder], tmp_path)) as url:
        opened = context.new_page()
        opened.goto(f"{url}/run/moving")
        assert "is loading" in opened.locator("main").inner_text()
        store = RunStore(folder, OrchestratorConfig.from_flat(model="starter", max_steps=3))
        try:
            opened.get_by_text("No step is recorded yet").wait_for(timeout=15_000)
            store.write_step(1, {"reward/mean": 0.5}, groups_of(1))
            store.flush()
            opened.locator(".legend b", has_text="0.5").first.wait_for(timeout=15_000)
            store.write_step(2, {"reward/mean": 0.8125}, groups_of(2))
            store.write_eval(2, {"eval/mean": 0.75}, groups_of(2, evaluation=True))
            store.flush()
            for text in ("0.8125", "0.75"):  # also the curve that the page did not know
                opened.locator(".legend b", has_text=text).first.wait_for(timeout=15_000)
            opened.locator("#head .num", has_text="0.812").first.wait_for(timeout=15_000)
            store.finish("finished")
        finally:
            store.close()
    context.close()


def test_hostile_text_runs_nothing(chromium: Any, tmp_path: Path) -> None:
    """In the page and in a report, which is opened as a file; what would run sets the title."""
    attack = (
        "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\u202e\x1b[31m"
        + "x" * 100_000
    )
    store = RunStore(tmp_path / "hostile", OrchestratorConfig())
    said = Rollout("r", "t<script>", 0, [{"role": "assistant", "content": attack}], [], attack, attack, reward=1.0)
    said.extra = {attack[:60]: attack}
    store.write_step(
        1,
        {"reward/mean": 1.0, "reward/<img src=x onerror=alert(1)>/mean": 1.0},
        [Group(Task("t<script>", attack), [said])],
    )
    store.event("warning", attack, step=1)
    store.finish("finished")
    store.close()
    client = client_of(tmp_path)
    write_report(tmp_path / "hostile", tmp_path / "report.html", 3)
    context = chromium.new_context()
    opened = context.new_page()
    opened.on("dialog", lambda dialog: pytest.fail(dialog.message))
    opened.goto((tmp_path / "report.html").as_uri())
    opened.wait_for_selector("html[data-drawn]")
    assert opened.title() == "hostile · mrl report"
    assert opened.locator("figure.chart canvas").count() >= 2
    for path in ("/run/hostile", "/run/hostile/rollouts", "/run/hostile/rollout/1", "/run/hostile/events"):
        opened.set_content(client.get(path).text.replace("script-src", "x"))  # even where no policy holds
        assert "run" not in opened.title().split(" ")[:1]
    context.close()
