"""A reward function in a file of its own: `--reward-funcs my_rewards.py:short_and_fenced`."""


def short_and_fenced(completions, log_metric=None, **kwargs):
    """1 for a fenced block of at most three lines, less for each line more, 0 without a block."""
    rewards = []
    for text in completions:
        body = text.strip()
        fenced = body.startswith("```") and body.endswith("```")
        extra_lines = max(0, len(body.splitlines()) - 5)  # three lines and the two fences
        rewards.append(max(0.0, 1.0 - 0.25 * extra_lines) if fenced else 0.0)
    if log_metric is not None:
        log_metric("fenced_fraction", sum(reward > 0 for reward in rewards) / len(rewards))
    return rewards
