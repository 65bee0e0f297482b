"""Train on the evaluation test beside this file: its pages, its environments, its score.

python examples/browsergym/train.py --model starter --max-steps 10
"""

import argparse
from pathlib import Path

from mrl import MRLTrainer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--max-steps", type=int, default=10)
    given = parser.parse_args()
    result = MRLTrainer(
        model=given.model,
        evaluation_test=Path(__file__).with_name("miniwob_eval.py"),
        max_tokens=32,
        max_completion_length=128,
        stop=["\n"],  # one line is one action
        batch_size=3,
        num_generations=4,
        max_concurrent_rollouts=6,
        max_steps=given.max_steps,
    ).train()
    print(result)
