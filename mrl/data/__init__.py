"""Tasks to train on, from anything a user may have; and the order in which they are taken.

    tasks = load_tasks("tasks.jsonl", prompt_column="question")
    order = TaskOrder(len(tasks), batch_size=8, seed=0)
    batch = [tasks[i] for i in order.next_batch()]

Sources by name ("tiny-code", "name:argument") are an open set: one file, one line in `DATASETS`.
"""

from mrl.data.load import load_rows, load_tasks
from mrl.data.order import TaskOrder
from mrl.data.sources import DATASETS, DatasetSource
from mrl.data.tasks import check_prompt_lengths, require_columns

__all__ = [
    "DATASETS",
    "DatasetSource",
    "TaskOrder",
    "check_prompt_lengths",
    "load_rows",
    "load_tasks",
    "require_columns",
]
