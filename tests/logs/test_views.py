"""Every view over HTTP: what it shows of a store that is known."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.testclient import TestClient

from mrl.config import OrchestratorConfig
from mrl.logs.evaluations import Attempt, Evaluation, counterpart, pair_of
from mrl.logs.report import report
from mrl.store.evaluation import write_evaluation
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task
from tests.logs.conftest import ATTEMPTS, STEPS, TASKS, client_of, groups_of, write_run

KEYS = re.compile(r'<tr data-href="/run/first/rollout/(\d+)')


def keys(html: str) -> list[int]:
    return [int(found) for found in KEYS.findall(html)]


def expected(runs: Path, **where: object) -> list[int]:
    with RunReader(runs / "first") as reader:
        return [row["key"] for row in reader.page(Filter(**where), limit=10_000, newest_first=True).rows]  # type: ignore[arg-type]


def test_the_table_of_runs(client: TestClient) -> None:
    html = client.get("/").text
    assert html.index("/run/second") < html.index("/run/first")  # newest first
    assert "finished" in html
    assert "starter" in html
    found = client.get("/?sort=best&up=1").text
    assert found.index("/run/second") < found.index("/run/first")
    assert client.get("/?sort=best").text.index("/run/first") < client.get("/?sort=best").text.index("/run/second")
    assert "/run/second" not in client.get("/?q=FIRST").text
    assert "No run is like that" in client.get("/?status=failed").text or "No run" in client.get("/?q=zzz").text


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    assert "mrl train quickstart" in client_of(tmp_path).get("/").text
    assert "Nothing to compare yet" in client_of(tmp_path).get("/compare").text
    assert "No evaluations yet" in client_of(tmp_path).get("/evals").text


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    client = client_of(tmp_path, [tmp_path / "later"])
    assert "nothing is recorded yet" in client.get("/").text
    assert client.get("/run/later").status_code == 404
    assert "is loading" in client.get("/run/later").text
    assert client.get("/run/later").headers["refresh"] == "2"
    assert "refresh" not in client.get("/run/never").headers
    write_run(tmp_path / "later", steps=1)
    assert client.get("/run/later").status_code == 200


def test_a_run_and_its_points(client: TestClient) -> None:
    html = client.get("/run/first").text
    for title in ("Reward by function", "Pass rate", "KL", "Seconds by phase", "Logprob gap"):
        assert title in html
    assert "1 warning" in html
    assert "does not answer" in html  # the actor
    found = client.get(
        "/run/first/series.json?metric=reward/mean&metric=train/kl&metric=eval:eval/mean&metric=no"
    ).json()
    assert found["series"]["reward/mean"] == {"x": list(range(1, 13)), "y": [step / 20 for step in range(1, 13)]}
    assert found["series"]["train/kl"]["y"][4] == "nan"
    assert found["series"]["eval:eval/mean"]["x"] == [4, 8, 12]
    assert found["series"]["no"] == {"x": [], "y": []}
    assert found["events"] == [
        {"step": 3, "kind": "warning", "message": "step 3: 1 of 12 rollouts could not be scored"}
    ]
    assert client.get("/run/first/series.json?metric=reward/mean&since=10").json()["series"]["reward/mean"]["x"] == [
        11,
        12,
    ]
    against = client.get("/run/first?y=reward/mean&x=train/kl").text
    assert "reward/mean against train/kl" in against


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("", {}),
        ("step=3", {"step": 3}),
        ("task=task/1", {"task_id": "task/1"}),
        ("status=failed", {"status": "failed"}),
        ("min=0.5", {"reward_min": 0.5}),
        ("max=0", {"reward_max": 0.0}),
        ("truncated=yes", {"truncated": True}),
        ("version=4&truncated=no", {"policy_version": 4, "truncated": False}),
        ("split=eval&step=8", {"split": "eval", "step": 8}),
    ],
)
def test_filters(client: TestClient, runs: Path, query: str, where: dict[str, object]) -> None:
    wanted = expected(runs, **where)
    assert wanted
    found, href = [], f"/run/first/rollouts?{query}"
    while href:
        html = client.get(href).text
        found += keys(html)
        following = re.search(r'rel="next" href="([^"]+)"', html)
        href = following[1].replace("&amp;", "&") if following else ""
        if following:
            asked, kept = parse_qs(query), parse_qs(urlsplit(href).query)
            assert {name: kept[name] for name in asked} == asked
    assert found == wanted
    assert f"<b>{len(wanted)}</b>" in client.get(f"/run/first/rollouts?{query}").text


def test_pages_back_and_forth(client: TestClient) -> None:
    first = client.get("/run/first/rollouts").text
    following = re.search(r'rel="next" href="([^"]+)"', first)
    assert following
    second = client.get(following[1].replace("&amp;", "&")).text
    back = re.search(r'rel="prev" href="([^"]+)"', second)
    assert back
    assert keys(client.get(back[1].replace("&amp;", "&")).text) == keys(first)


def test_orders(client: TestClient, runs: Path) -> None:
    with RunReader(runs / "first") as reader:
        rows = {row["key"]: row for row in reader.page(limit=10_000).rows}
    for order in ("reward", "tokens", "advantage"):
        for up in ("", "1"):
            values = [rows[key][order] for key in keys(client.get(f"/run/first/rollouts?order={order}&up={up}").text)]
            assert values == sorted(values, reverse=not up)
            assert len(values) == 50


def test_what_cannot_be_understood_is_said(client: TestClient) -> None:
    found = client.get(
        "/run/first/rollouts?step=abc&min=nan&status=odd&after=x&version=99999999999999999999&order=none"
    )
    assert found.status_code == 200
    for problem in ("step: &#39;abc&#39; is no whole number", "min:", "status: &#39;odd&#39; is none of", "after:"):
        assert problem in found.text
    assert len(keys(found.text)) == 50


def test_text_search(client: TestClient) -> None:
    found = client.get("/run/first/rollouts?text=ANSWER+7.1.&step=7").text
    assert len(keys(found)) == ATTEMPTS
    assert f"<b>{ATTEMPTS}</b> of {TASKS * ATTEMPTS} rollouts have" in found
    assert keys(client.get("/run/first/rollouts?text=assistant").text) == []  # a role is no text
    assert len(keys(client.get("/run/first/rollouts?text=print(2+%3C+1)%0A").text)) == 48
    assert "<b>1</b> of 144 rollouts has" in client.get("/run/first/rollouts?text=answer+7.1.2").text


def test_a_search_lists_pages_and_counts_the_rest(client: TestClient, runs: Path, monkeypatch: Any) -> None:
    """With no time at all each request looks at one chunk."""
    monkeypatch.setattr("mrl.logs.rollout_search.SECONDS", 0.0)
    monkeypatch.setattr("mrl.store.search.CHUNK", 7)
    listed, href, requests = [], "/run/first/rollouts?text=ANSWER", 0
    while "searching on" in (html := client.get(href).text) or not requests:
        requests += 1
        listed += keys(html)
        following = re.search(r'<tr class="note" hx-get="([^"]+)"', html)
        assert following
        href = following[1].replace("&amp;", "&")
    listed += keys(html)
    assert len(listed) == 50
    assert "<b>50</b> in the first 50 of 144 rollouts, counting on" in html
    more = re.search(r'class="note more" hx-get="([^"]+)"', html)
    while count := re.search(r'id="matches" hx-get="([^"]+)"', html):
        html = client.get(count[1].replace("&amp;", "&")).text
        assert not keys(html)
    assert "<b>144</b> of 144 rollouts have" in html
    more = re.search(r'class="note more" hx-get="([^"]+)"', html)
    while more:
        html = client.get(more[1].replace("&amp;", "&")).text
        listed += keys(html)
        assert "<b>144</b> of 144" in html
        assert 'id="matches" hx-get' not in html  # the total is known
        more = re.search(r'<tr class="note(?: more)?" hx-get="([^"]+)"', html)
    assert listed == expected(runs)
    monkeypatch.setattr("mrl.logs.rollout_search.MOST", 60)
    monkeypatch.setattr("mrl.logs.rollout_lists.MOST", 60)
    monkeypatch.setattr("mrl.logs.rollout_search.SECONDS", 1.0)
    monkeypatch.setattr("mrl.store.search.CHUNK", 128)
    count = re.search(r'id="matches" hx-get="([^"]+)"', client.get("/run/first/rollouts?text=ANSWER").text)
    assert count
    assert "more than <b>60</b> of 144 rollouts have" in client.get(count[1].replace("&amp;", "&")).text


def test_one_rollout(client: TestClient, runs: Path) -> None:
    key = expected(runs, step=5)[0]
    with RunReader(runs / "first") as reader:
        row = reader.rollout(key)
    chat = client.get(f"/run/first/rollout/{key}").text
    assert "print(2 &lt; 1)" in chat
    assert '<div class="code">' in chat
    assert "style" in chat
    assert "verdict" in chat
    tokens = client.get(f"/run/first/rollout/{key}?view=tokens&colour=gap").text
    assert tokens.count('class="t g5"') == 1  # the legend's
    assert tokens.count('class="t g4"') == 1  # +0.25
    assert tokens.count('class="t e"') == 2  # the environment's token, and the legend's
    assert "trainer 0.15, gap +0.25" in tokens
    assert "2 tokens of prompt, 2 sampled, 1 of the environment" in tokens
    raw = client.get(f"/run/first/rollout/{key}?raw=1")
    assert raw.headers["content-disposition"].startswith("attachment")
    assert json.loads(raw.text)["samples"][0]["completion_ids"] == row["samples"][0]["completion_ids"]
    beside = client.get(f"/run/first/rollout/{key}/neighbours.json?step=5").json()
    assert beside == {"before": None, "after": expected(runs, step=5)[1]}
    assert client.get("/run/first/rollout/999999").status_code == 404


def test_an_attempt_of_many_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes some of them; in simple mode it says what nobody recorded."""
    monkeypatch.setattr("mrl.logs.rollout_views.MOST_TOKENS", 30)
    store = RunStore(tmp_path / "r", OrchestratorConfig.from_flat(model="starter", mode="simple"))
    samples = [Sample([1] * 4, [2] * 8, [float("nan")] * 8, [1] * 8, 0) for _ in range(7)]
    store.write_step(1, {}, [Group(Task("t", "p"), [Rollout("r", "t", 0, [], samples, reward=1.0, advantage=0.5)])])
    store.close()
    client, shown, href = client_of(tmp_path), [], "/run/r/rollout/1?view=tokens"
    while href:
        html = client.get(href).text
        shown += re.findall(r"sample (\d) of 7", html)
        more = re.search(r'href="([^"]+)">samples \d', html)
        href = more[1].replace("&amp;", "&") if more else ""
    assert shown == list("1234567")
    assert '<option value="advantage" selected>' in html
    assert "logprob of the sampler (not recorded)" in html
    assert "TRL&#39;s own loop" in html or "TRL's own loop" in html
    assert "mean logprob" not in html
    assert "mean logprob" not in client.get("/run/r/rollout/1?view=tokens&colour=logprob").text


def test_a_group_and_a_task(client: TestClient) -> None:
    group = client.get("/run/first/group/train/3/0").text
    assert group.count('<article class="attempt') == ATTEMPTS
    assert "SandboxError: it broke" in group
    assert client.get("/run/first/group/train/3/99").status_code == 404
    task = client.get("/run/first/task?id=task/2").text
    assert f"{STEPS * ATTEMPTS} attempts in training, 3 in evaluations" in task
    assert client.get("/run/first/task?id=none").status_code == 404
    assert "task/1" in client.get("/run/first/tasks").text


def test_events_and_configuration(client: TestClient) -> None:
    assert "could not be scored" in client.get("/run/first/events?kind=warning").text
    assert "workers are up" not in client.get("/run/first/events?kind=warning").text
    assert "learning_rate" in client.get("/run/first/config").text


def test_runs_side_by_side(client: TestClient) -> None:
    html = client.get("/compare?run=first&run=second").text
    assert "learning_rate" in html
    assert "3e-05" in html
    assert "beta" not in re.findall(r"<th>(\w+)</th>", html)  # the same in both
    specs = [json.loads(found.replace("&#34;", '"')) for found in re.findall(r'data-chart="([^"]+)"', html)]
    assert [one["run"] for one in specs[0]["series"]] == ["first", "second"]
    assert client.get("/compare?run=none").status_code == 404


def test_evaluations(client: TestClient) -> None:
    html = client.get("/evals").text
    assert html.count('name="e"') == 5  # three of one run, two of the other
    assert "<th>family</th>" in html
    diff = client.get("/evals/diff?a=first@4&b=first@8").text
    assert "fixed" in diff
    rows = list(csv.DictReader(io.StringIO(client.get("/evals/diff?a=first@4&b=first@8&format=csv").text)))
    assert {row["task"] for row in rows} == {"task/0", "task/1", "task/2"}
    for row in rows:
        assert float(row["difference"]) == float(row["b"]) - float(row["a"])
    lines = client.get("/evals/export?format=jsonl&e=first@4").text.splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["task/0", "task/1", "task/2"]
    assert client.get("/evals/export?format=png&e=first@4").content.startswith(b"\x89PNG")
    assert client.get("/evals/diff?a=first@4&b=none@1").status_code == 404
    assert "task/1" in client.get("/run/first/evals?by=task&value=tokens").text


def test_two_models_task_by_task(client: TestClient, runs: Path) -> None:
    """What both said is next to each other, in the order of the list, with ways to the next one of its kind."""
    html = client.get("/evals/diff?a=first@4&b=first@12").text
    assert "first@12" in html
    hrefs = [found.replace("&amp;", "&") for found in re.findall(r'<tr data-href="(/evals/diff/task[^"]+)"', html)]
    assert len(hrefs) == TASKS
    assert html.index("answer 4.") < html.index("answer 12.")  # A's column first
    page = client.get(hrefs[0]).text
    (task,) = parse_qs(urlsplit(hrefs[0]).query)["task"]
    k = task.removeprefix("task/")
    assert f"say {k}" in page  # the prompt, once
    assert page.count("<h3>Prompt") == 1
    assert page.index(f"answer 4.{k}.0") < page.index(f"answer 12.{k}.0")
    assert page.count('<article class="attempt') == 2
    assert f'rel="next" href="{hrefs[1]}"'.replace("&", "&amp;") in page
    assert 'rel="prev"' not in page
    fixed = client.get("/evals/diff/task?a=first@4&b=first@12&change=fixed&task=none")
    assert fixed.status_code == 404
    csv_rows = list(csv.DictReader(io.StringIO(client.get("/evals/diff?a=first@4&b=first@12&format=csv").text)))
    assert [row["task"] for row in csv_rows] == [parse_qs(urlsplit(href).query)["task"][0] for href in hrefs]


def test_evaluations_on_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a command recorded: named by model and test, first compared with one of the same tasks."""
    monkeypatch.setenv("MRL_RUNS", str(tmp_path))
    write_run(tmp_path / "trained", steps=4)
    config = OrchestratorConfig.from_flat(model="starter")
    for at, model in ((1, "starter"), (2, "trained@2")):
        groups = groups_of(at, evaluation=True)
        write_evaluation(config, {"eval/mean": 0.5}, groups, of="test_sums", model=model, passed=True)
    other = [Group(Task("elsewhere", "?"), [Rollout("x", "elsewhere", 0, [], [], reward=0.0)])]
    alone = write_evaluation(config, {"eval/mean": 0.0}, other, of="a/b:test", model="<m>")
    assert re.fullmatch(r"eval-b-test-\d{8}-\d{6}", alone.name)
    client = client_of(tmp_path)
    html = client.get("/evals").text
    for words in ("trained@2", "test_sums", "its held-out tasks", "&lt;m&gt;"):
        assert words in html
    assert f'name="b" value="{alone.name}@0" checked' not in html  # there is nothing to compare it with
    assert len(re.findall(r'name="[ab]" value="[^"]+" checked', html)) == 2
    assert html.count('name="e"') - html.count('checked aria-label="Pick') == 1  # nor is it in the pivot table
    page = client.get("/")
    assert page.text.count("Measured on") == 6  # a label and a title each
    name = next(name for name in re.findall(r'href="/run/(eval-test_sums[^"]+)"', page.text))
    assert "so there are no curves" in client.get(f"/run/{name}").text
    rows = client.get(f"/run/{name}/rollouts").text
    assert rows.count("<tr data-href") == TASKS  # its own split, though nobody says which
    told = report(tmp_path / name, 2)
    assert "Measured on" in told
    assert "Highest rewards</h2>" in told
    assert "<figure" not in told  # one evaluation is no curve
    diff = client.get(f"/evals/diff?a={alone.name}@0&b={name}@0").text
    assert "no task in common" in diff


def test_counterparts() -> None:
    def made(run: str, step: int, at: float, tasks: str) -> Evaluation:
        one = Evaluation(run, step, run, "t", run == "r", at, 1, 0)
        one.attempts = [Attempt(task, 0, 1.0, 1, 1, None) for task in tasks]
        return one

    first, last, alone, other = made("r", 0, 1, "ab"), made("r", 8, 3, "ab"), made("e", 0, 4, "b"), made("o", 0, 5, "z")
    everything = [other, alone, last, first]
    assert counterpart(last, everything) is first
    assert counterpart(alone, everything) is last
    assert counterpart(other, everything) is None
    assert pair_of(everything) == (last, alone)
    assert pair_of([other]) == (other, other)
    assert pair_of([]) is None


def test_costs_are_shown_where_there_are_any(client: TestClient, tmp_path: Path) -> None:
    assert "Cost" not in client.get("/").text
    write_run(tmp_path / "paid", steps=2, costs=True)
    write_run(tmp_path / "free", steps=2)
    page = client_of(tmp_path)
    html = page.get("/?sort=cost").text
    assert "$0.50" in html
    assert html.index("/run/paid") < html.index("/run/free")
    assert "$0.50" in page.get("/run/paid/head").text
    assert "dollars" in page.get("/run/paid").text


def test_a_page_of_named_runs_shows_no_others(runs: Path) -> None:
    client = client_of(runs, [runs / "second"])
    assert "/run/first" not in client.get("/").text
    assert client.get("/run/first").status_code == 404


def test_a_run_goes_on(tmp_path: Path) -> None:
    """What is new is there with the next request; nothing is kept of a run that moves."""
    write_run(tmp_path / "moving", steps=2, status="running")
    store = RunStore.reopen(tmp_path / "moving")
    client = client_of(tmp_path)
    assert "running" in client.get("/run/moving").text
    store.write_step(3, {"reward/mean": 0.75}, [])
    store.flush()
    found = client.get("/run/moving/series.json?metric=reward/mean&since=2").json()
    assert (found["series"]["reward/mean"], found["live"]) == ({"x": [3], "y": [0.75]}, True)
    assert "0.75" in client.get("/run/moving/head").text
    store.finish("finished")
    store.close()
    assert "finished" in client.get("/run/moving/head").text
