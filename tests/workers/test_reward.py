"""The reward worker: from picklable arguments to a report."""

import pickle

import pytest

from mrl.errors import ConfigError, RewardError
from mrl.rewards.base import RewardRequest
from mrl.sandbox.local import LocalSandbox
from mrl.workers.reward import RewardWorker, make_limits


def length(completions, trainer_state, log_metric):
    log_metric("step", trainer_state.global_step)
    return [float(len(c)) for c in completions]


async def test_scores_with_code_tests_and_functions():
    arguments = {
        "reward_funcs": ["sandbox", length],
        "reward_weights": [10.0, 1.0],
        "sandbox_limits": {"memory_mb": 64},
    }
    worker = RewardWorker(**pickle.loads(pickle.dumps(arguments)))
    worker.check_columns(["testcases"])
    with pytest.raises(RewardError, match="testcases"):
        worker.check_columns(["answer"])
    requests = [
        RewardRequest(f"r{k}", "p", code, [1], {"testcases": "assert x == 1"})
        for k, code in enumerate(["x=1", "x = 2"])
    ]
    report = await worker.score(pickle.loads(pickle.dumps(requests)), {"global_step": 4})
    assert [r.reward for r in report.results] == [13.0, 5.0]
    assert [r.extra["verdict"]["status"] for r in report.results] == ["passed", "failed"]
    assert report.metrics["step"] == 4
    assert report.metrics["sandbox/passed"] == 0.5
    assert pickle.loads(pickle.dumps(report)) == report
    assert isinstance(worker._sandbox, LocalSandbox)
    supervisors = [s.process for s in worker._sandbox._executor._idle]
    await worker.close()
    assert all(process.poll() is not None for process in supervisors)


async def test_starts_no_sandbox_without_need():
    worker = RewardWorker(length)
    await worker.score([RewardRequest("r", "p", "abc", [1])], {"global_step": 0})
    assert worker._sandbox is None
    await worker.close()


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="sandbox: 'docker' is not available"):
        RewardWorker(sandbox="docker")
    with pytest.raises(ConfigError, match="reward_timeout"):
        RewardWorker(reward_timeout=0)
    with pytest.raises(RewardError, match="reward_weights: 2 for 1"):
        RewardWorker(reward_weights=[1, 2])


def test_limits():
    assert make_limits({"wall_seconds": 3, "memory_mb": 64.0}).memory_mb == 64
    for bad, message in (
        ({"wal_seconds": 3}, "known: wall_seconds"),
        ({"wall_seconds": 0}, "not a number above 0"),
        ({"wall_seconds": float("nan")}, "not a number above 0"),
        ({"wall_seconds": "3"}, "not a number above 0"),
        ({"processes": True}, "not a number above 0"),
        ({"memory_mb": 1.5}, "not a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_limits(bad)


def test_options_of_the_sandbox_reach_it():
    worker = RewardWorker(sandbox_options={"slots": 1, "modules": ["math"]})
    sandbox = worker._get_sandbox()
    assert (sandbox._executor.slots, sandbox._executor.modules) == (1, ("math",))
    sandbox.shutdown()
    with pytest.raises(ConfigError, match=r"sandbox 'auto' has no argument 'slot'; it has slots, layer"):
        RewardWorker(sandbox_options={"slot": 1})
