"""A policy is to learn to use tools: for the age of somebody's teacher it asks who that is, then the age, then answers.

A beginner that knows the tools and mostly calls any of them is built first, in half a minute (`mrl.starter.beginner`);
then it is trained on whether its answer is right, or with --step-rewards on what each step is worth.

python examples/asking_around.py
python examples/asking_around.py --step-rewards --seed 1
"""

import argparse
import random
from itertools import product
from pathlib import Path

from mrl import MRLTrainer
from mrl.starter.beginner import build_beginner, demonstrate

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Ned", "Olga")
RELATIONS = ("teacher", "neighbour")
QUESTIONS = list(product(NAMES, RELATIONS))
random.Random(0).shuffle(QUESTIONS)
HELD_OUT, TRAINED = QUESTIONS[::3], [question for number, question in enumerate(QUESTIONS) if number % 3]
TURNS = 3
"""Who, how old, the answer."""
ATTENTION = 0.3
"""How often those call the right tool on purpose whom the beginner imitates."""


class Village:
    """Who is whose teacher and how old, other in every task; the tools to find out, and to answer."""

    def reset(self, name: str, relation: str, people: dict[str, dict], **columns) -> None:
        self.people, self.person = people, people[name][relation]
        self.steps = [("who", self.person), ("age", people[self.person]["age"])]
        self.answered = self.right = False

    def teacher(self, name: str) -> str:
        """
        Who somebody's teacher is.

        Args:
            name: Whose.
        """
        return self._told("who", self.people[name]["teacher"])

    def neighbour(self, name: str) -> str:
        """
        Who somebody's neighbour is.

        Args:
            name: Whose.
        """
        return self._told("who", self.people[name]["neighbour"])

    def age(self, name: str) -> int:
        """
        How old somebody is.

        Args:
            name: Who.
        """
        return self._told("age" if name == self.person else "another's age", self.people[name]["age"])

    def answer(self, number: int) -> str:
        """
        Gives the answer; the first one counts.

        Args:
            number: The answer.
        """
        if not self.answered:
            self.answered, self.right = True, number == self.people[self.person]["age"]
            self._earn(float(self.right))
        return "thanks"

    def _told(self, what: str, it):
        if self.steps and self.steps[0] == (what, it):  # the next that has to be found out
            self.steps.pop(0)
            self._earn(0.1)
        return it

    def _earn(self, reward: float) -> None:
        """Told of what each step is worth: a tenth on the way, 1 for the right answer."""


class Outcome(Village):
    """With one reward, for the right answer."""

    def get_reward(self) -> float:
        return float(self.right)


class Steps(Village):
    """With rewards for steps alone."""

    step_reward = 0.0

    def _earn(self, reward: float) -> None:
        self.step_reward += reward


def tasks(questions, times: int, rng: random.Random) -> list[dict]:
    """Each of the questions so many times, about other people."""

    def people() -> dict[str, dict]:
        drawn = {name: rng.sample([other for other in NAMES if other != name], 2) for name in NAMES}
        return {name: {"teacher": t, "neighbour": n, "age": rng.randrange(20, 80)} for name, (t, n) in drawn.items()}

    return [
        {"prompt": f"How old is the {relation} of {name}?", "name": name, "relation": relation, "people": people()}
        for name, relation in questions
        for _ in range(times)
    ]


def careless_demonstrations(count: int, rng: random.Random) -> list[list[dict]]:
    """Of somebody who mostly asks anything of whoever was mentioned last, or makes up a number."""
    village, rows = Village(), tasks(TRAINED, 50, rng)

    def shown(prompt: str, **columns) -> list[dict]:
        mentioned = columns["name"]

        def move():
            nonlocal mentioned
            if village.answered:
                return "done"
            if isinstance(mentioned, int):
                return "answer", {"number": mentioned}
            if rng.random() < 0.1:
                return "answer", {"number": rng.randrange(20, 80)}
            needed = columns["relation"] if mentioned == columns["name"] else "age"
            tool, name = needed if rng.random() < ATTENTION else rng.choice((*RELATIONS, "age")), mentioned
            mentioned = village.people[name][tool]
            return tool, {"name": name}

        return demonstrate(village, prompt, columns, move, TURNS)

    return [shown(**rng.choice(rows)) for _ in range(count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lessons", type=int, default=300, help="steps of the supervised phase")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-rewards", action="store_true", help="rewards for each step, and none at the end")
    options = parser.parse_args()

    beginner, rng = Path("beginners") / "asking-around", random.Random(0)
    if not (beginner / "config.json").exists():
        shown, village = careless_demonstrations(6000, rng), Village()
        tools = [village.teacher, village.neighbour, village.age, village.answer]
        build_beginner(beginner, shown, tools, steps=options.lessons)
    result = MRLTrainer(
        model=str(beginner),
        train_dataset=tasks(TRAINED, 10, random.Random(1)),
        eval_dataset=tasks(HELD_OUT, 20, random.Random(2)),
        eval_samples=None,
        environment_factory=Steps if options.step_rewards else Outcome,
        max_turns=TURNS,
        max_completion_length=64,
        max_steps=options.steps,
        eval_steps=15,
        save_steps=0,
        batch_size=16,
        num_generations=8,
        learning_rate=1e-3,
        num_rollout_workers=1,
        weight_sync_method="direct",
        seed=options.seed,
    ).train()
    print(f"held-out questions answered: {result.eval_metrics['eval/pass_rate']:.0%} after {result.steps} steps")
