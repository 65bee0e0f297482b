"""Web tasks of MiniWoB++ in a real Chromium: the policy sees a page as numbered elements, clicks and fills.

It needs Chromium (Debian: apt-get install chromium), `pip install 'mrl[miniwob]'`, and a model that calls tools.

python examples/web_tasks.py --model Qwen/Qwen2.5-1.5B-Instruct
"""

import argparse

from mrl import MRLTrainer
from mrl.environments.miniwob.environment import MiniWoB

TASKS = ("click-test", "click-button", "enter-text", "login-user", "choose-list")


def tasks(count):
    """Another page for each of them; the attempts at one see the same."""
    prompt = [{"role": "user", "content": "Do what is asked on the web page, one action at a time."}]
    return [{"prompt": prompt, "task": TASKS[seed % len(TASKS)], "seed": seed} for seed in range(count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=200)
    given = parser.parse_args()
    trainer = MRLTrainer(
        model=given.model,
        train_dataset=tasks(1000),
        environment_factory=MiniWoB,
        max_turns=6,
        max_tokens=64,
        max_completion_length=256,
        max_steps=given.max_steps,
        batch_size=given.batch_size,
        num_generations=4,
        learning_rate=1e-5,
    )
    result = trainer.train()
    print(f"{result.status} after {result.steps} steps: {result.run_dir}")
