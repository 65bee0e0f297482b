"""Web tasks of MiniWoB++ in a real Chromium, as an evaluation test: a benchmark, and what a model is trained on.

It needs Chromium (Debian: apt-get install chromium) and `pip install 'mrl[miniwob]'`.

mrl eval examples/browsergym/miniwob_eval.py --model starter
pytest examples/browsergym/miniwob_eval.py --mrl-model my-run
python examples/browsergym/train.py --model starter

With `mrl env serve miniwob --port 8000` and MINIWOB_SERVER=http://127.0.0.1:8000 the pages come from an OpenEnv
server, which may be on another machine.
"""

import os
import re
from dataclasses import dataclass

from mrl.environments.miniwob.environment import MiniWoB
from mrl.evals import (
    EvaluateResult,
    EvaluationRow,
    InputMetadata,
    Message,
    MetricResult,
    OpenEnvRolloutProcessor,
    StepOutput,
    evaluation_test,
)

TASKS = ["click-test", "click-button", "enter-text"]
ASK = "Do what is asked on the web page. Answer with one action, such as click('1') or fill('2', 'text')."


@dataclass
class Seen:
    text: str


@dataclass
class Step:
    """What OpenEnv's clients return."""

    observation: Seen
    reward: float
    done: bool


class Pages:
    """A session: MiniWoB++ with OpenEnv's `reset` and `step`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.web = MiniWoB(max_actions=4)

    def reset(self, seed=0, task="click-test"):
        return Step(Seen(self.web.reset(seed=seed, task=task)), 0.0, False)

    def step(self, action):
        before = self.web.get_reward()
        text = self.web.act(action["action_str"])
        return Step(Seen(text), self.web.get_reward() - before, self.web.done)

    def close(self):
        self.web.__exit__()


def first_action(text):
    """The first call in the model's text; without one nothing is done."""
    found = re.search(r"\w+\([^()]*\)", text)
    return {"action_str": found.group() if found else "noop()"}


def page(observation, step, history):
    """What the model is told."""
    return observation.text


server = os.environ.get("MINIWOB_SERVER")
where = {"env_base_url": server} if server else {"env_factory": Pages}
processor = OpenEnvRolloutProcessor(
    prompt_builder=page, action_parser=first_action, tasks=TASKS, task_var="task", request_timeout_s=60, **where
)
rows = [
    EvaluationRow(
        messages=[Message(role="user", content=ASK)],
        input_metadata=InputMetadata(row_id=f"page-{seed}", dataset_info={"seed": seed}),
    )
    for seed in range(12)
]


@evaluation_test(
    input_rows=[rows],
    completion_params=[{"model": "starter", "temperature": 1.0, "max_tokens": 32, "stop": ["\n"]}],
    rollout_processor=processor,
    steps=4,
    max_concurrent_rollouts=6,
    passed_threshold=0.0,
)
def test_miniwob(row: EvaluationRow) -> EvaluationRow:
    """1 where the page was dealt with, 0 where it was not, or wrongly."""
    rewards = row.execution_metadata.extra["step_rewards"]
    solved = float(sum(rewards) > 0)
    row.evaluation_result = EvaluateResult(
        score=solved,
        reason=f"the page gave {sum(rewards):g} after {len(rewards)} actions",
        metrics={"actions": MetricResult(score=len(rewards), reason="how many there were")},
        step_outputs=[StepOutput(step_index=n, base_reward=reward) for n, reward in enumerate(rewards)],
    )
    return row
