"""Text that models write is shown and does nothing: on every view that has it, and in a report."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mrl.config import OrchestratorConfig
from mrl.logs.report import report
from mrl.logs.text import LINE, MOST, blocks, cut, one_line, plain, shown
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task
from tests.logs.conftest import client_of

ATTACKS = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "attribute": "\"' onmouseover=alert(1) x='\"><svg/onload=alert(1)>",
    "ansi": "\x1b[31mred\x1b[0m\x1b]8;;http://x\x07link\x1b]8;;\x07 \x9b2J",
    "direction": "user\u202eresu\u202c \u2066x\u2069 \u200f\u200e \u061c",
    "nothing": "a\u200bb\u2060c\ufeffd\u00ade\U000e0041f",
    "bytes": b"\xff\xfe caf\xc3".decode("utf-8", "surrogateescape") + "\ud800",
    "null": "a\x00b\x08c\r\nd",
    "template": "{{ 7 * 7 }} {% raw %} ${7*7} <!-- -->",
    "json": '</script><script>alert(1)</script>{"a": "\\u003c"}',
    "fence": "```\n</pre></div><script>alert(1)</script>\n```\n`````html\n<b>",
    "line": "x" * 1_000_000,
    "lines": "y\n" * 200_000,
    "formula": "=HYPERLINK(1)",
}
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is an attack: prompts, completions, names, errors, columns, events, its own name."""
    root = tmp_path_factory.mktemp("hostile")
    store = RunStore(root / "a <script>alert(1)<\\x> 'run' \u202e", OrchestratorConfig.from_flat(model="<b>model</b>"))
    groups = []
    for at, (name, attack) in enumerate(ATTACKS.items()):
        short = attack[:200]
        task = Task(f"{name} {short}", attack, {short: short, "answer": attack[:5000]})
        messages = [
            {"role": short, "content": attack},
            {"role": "assistant", "name": short, "content": attack, "tool_calls": [{"function": {"name": short}}]},
            short,
        ]
        samples = [Sample([1, 2**40], [3, 4], [-1.0, float("-inf")], [1, 1], 0)]
        rollout = Rollout(f"r{at}", task.id, 0, messages, samples, attack, attack, reward=0.5, rewards={short: 0.5})
        rollout.extra = {short: short, "verdict": {"status": short, "detail": attack, "tests": 1, "passed": 0}}
        result = {"reason": attack, "metrics": {short: {"score": short, "reason": attack}}, "is_score_valid": False}
        rollout.extra["evaluation_result"] = result
        rollout.metrics = {short: 1.0}
        failed = Rollout(f"f{at}", task.id, 1, [], [])
        failed.fail(attack)
        groups.append(Group(task, [rollout, failed]))
    metrics = {"reward/mean": float("inf"), "reward/<script>/mean": 1.0}
    store.write_step(1, metrics, groups)
    store.write_eval(1, {"eval/mean": 0.5}, groups)
    for attack in ATTACKS.values():
        store.event("warning", attack, step=1, more=attack[:200])
    store.finish("failed", ATTACKS["script"] + ATTACKS["direction"])
    store.close()
    return next(root.iterdir())


class Elements(HTMLParser):
    """What a browser would make elements and attributes of."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script" and not dict(attrs).get("src")
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "action", "hx-get", "formaction")
        ]


KNOWN = {
    *("html", "head", "meta", "title", "link", "script", "body", "header", "a", "span", "nav", "div", "button", "main"),
    *("dialog", "h1", "h2", "h3", "dl", "dt", "dd", "kbd", "form", "p", "b", "ul", "ol", "li", "details", "summary"),
    *("figure", "figcaption", "label", "input", "output", "section", "select", "option", "table", "thead", "tbody"),
    *(
        "tr",
        "th",
        "td",
        "pre",
        "code",
        "q",
        "i",
        "aside",
        "article",
        "img",
        "svg",
        "line",
        "circle",
        "polyline",
        "style",
    ),
}


def check(text: str, *, inline: int = 0) -> None:
    found = Elements(text)
    assert found.tags <= KNOWN, found.tags - KNOWN
    assert not found.handlers
    assert found.scripts == inline, re.findall(r".{80}<script(?! src).{80}", text, re.DOTALL)
    assert all(link.startswith(("/", "?", "#")) or link == "" for link in found.links)
    # Half surrogates cannot be written at all; the others stand for themselves only in values of forms and data.
    visible = re.sub(r'(value|data-[a-z]+|href|hx-get|name)="[^"]*"', "", text)
    odd = HIDDEN.search(visible.replace("\n", ""))
    assert odd is None, visible[max(odd.start() - 200, 0) : odd.end() + 50]


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return client_of(folder.parent)


def test_every_view(client: TestClient, folder: Path) -> None:
    runs = client.get("/")
    check(runs.text)
    href = next(link for link in Elements(runs.text).links if link.startswith("/run/"))
    for path in ("", "/rollouts", "/rollouts?split=eval", "/tasks", "/events", "/config", "/evals?by=task", "/head"):
        found = client.get(href + path)
        assert found.status_code == 200, (path, found.text[:500])
        check(found.text)
    for path in ("/evals", "/evals?by=answer", "/compare?run=" + href.removeprefix("/run/"), "/run/%3Cscript%3E"):
        check(client.get(path).text)
    for key in (*range(1, 2 * len(ATTACKS) + 1, 2), 2):  # every attack, and one that failed with it
        for view in ("chat", "tokens", "json"):
            found = client.get(f"{href}/rollout/{key}?view={view}")
            assert found.status_code == 200, (key, view)
            check(found.text)
            assert len(found.text) < 400_000, (key, view, len(found.text))
        saved = client.get(f"{href}/rollout/{key}?raw=1").headers["content-disposition"]
        assert re.fullmatch(r'attachment; filename="[\w@.-]+"', saved)
    for group in range(len(ATTACKS)):
        check(client.get(f"{href}/group/train/1/{group}").text)
    for name in ATTACKS:
        for link in Elements(client.get(f"{href}/tasks").text).links:
            if f"/task?id={name}" in link:
                assert client.get(link).status_code == 200
                check(client.get(link).text)


def test_all_of_a_line_of_a_megabyte(client: TestClient) -> None:
    href = next(link for link in Elements(client.get("/").text).links if link.startswith("/run/"))
    at = 2 * list(ATTACKS).index("line") + 1
    page = client.get(f"{href}/rollout/{at}").text
    assert "998,000 more characters: show all" in page
    more = re.search(r'hx-get="([^"]+/message/0)"', page)
    assert more
    assert client.get(html.unescape(more[1])).text.count("x") == 1_000_000


def test_a_report(folder: Path) -> None:
    found = report(folder, 20)
    check(found, inline=5)  # four scripts and the data
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', found)
    assert policy
    assert "unsafe-inline" not in policy[1].split("script-src")[1].split(";")[0]
    assert "http-equiv" in found
    assert not re.findall(r'(?:src|href)="(?!#|/run|")', found)


def test_what_is_invisible_is_named() -> None:
    assert "␛" in shown("\x1b[0m")
    assert ">RLO<" in shown("\u202e")
    assert ">\\ud800<" in shown("\ud800")
    assert ">\\x9b<" in shown("\x9b")
    assert str(shown("<a&b>")) == "&lt;a&amp;b&gt;"
    assert str(shown("Grüße, שלום, 你好 👩‍👩‍👧\n\tx")) == "Grüße, שלום, 你好 👩‍👩‍👧\n\tx"
    assert plain("a\u202eb") == "aRLOb"
    assert one_line("a\nb") == "a ⏎ b"


@given(st.text(st.characters(), max_size=400))
def test_shown_text_loses_nothing_and_escapes_all(text: str) -> None:
    found = str(shown(text))
    assert "<" not in re.sub(r'<span class="ctl" title="[^"<>]*">|</span>', "", found)
    kept = html.unescape(re.sub(r'<span class="ctl"[^>]*>[^<]*</span>', "", found))
    assert kept == "".join(c for c in text if c in kept) or set(kept) <= set(text)
    assert not HIDDEN.search(found)


@given(st.text(st.sampled_from("a`\n "), max_size=60))
def test_blocks_keep_the_text(text: str) -> None:
    said = "".join(str(piece.html) for _, _, piece in blocks(text)).replace("`", "")
    assert said.count("a") + sum(info.count("a") for _, info, _ in blocks(text)) == text.count("a")


def test_cutting() -> None:
    assert cut("ab\ncd") == cut("ab\ncd", 5)
    assert (cut("ab\ncd").html, cut("ab\ncd").hidden) == ("ab\ncd", 0)
    assert cut("x" * (LINE + 7)).hidden == 7
    assert cut("x\n" * MOST).hidden == MOST + 1  # the line break before the cut, too
    assert cut("").hidden == 0
