"""A number is guessed in an OpenEnv environment, which runs in this process; a server's would be named by its address.

pip install 'mrl[openenv]'
python examples/openenv_guess.py
"""

import argparse
import re

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from mrl import MRLTrainer


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessNumber(Environment[Guess, Hint, State]):
    """Says whether a guess is too small or too large. A dataset's columns are arguments of `reset`."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # instances share nothing, so attempts may have one each

    def reset(self, seed=None, episode_id=None, secret=5, **columns):
        self.secret = secret
        return Hint(text="Guess a number from 1 to 9.")

    def step(self, action, timeout_s=None, **columns):
        if action.number == self.secret:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="Too small." if action.number < self.secret else "Too large.", reward=0.0)

    @property
    def state(self):
        return State()


def read_guess(text):
    """The first number; a text without one guesses 0."""
    numbers = re.findall(r"\d+", text)
    return {"number": int(numbers[0][:3]) if numbers else 0}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--max-steps", type=int, default=50)
    given = parser.parse_args()
    result = MRLTrainer(
        model=given.model,
        train_dataset=[{"prompt": "Answer with a number.", "secret": number} for number in range(1, 10)],
        rollout_source="openenv",
        rollout_options={"env_class": GuessNumber, "action_parser": read_guess},
        max_turns=3,
        max_completion_length=48,
        max_tokens=16,
        batch_size=3,
        num_generations=4,
        max_steps=given.max_steps,
    ).train()
    print(result)
