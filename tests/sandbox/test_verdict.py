"""From a supervisor's report to a verdict."""

import os
import signal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mrl.sandbox._verdict import Run, merge_runs, run_from_report
from mrl.sandbox.base import IOTest, Limits, TestResult, Verdict

NONCE = "0123456789abcdef"
USUAL = Limits()


def report(records: str, **changes: Any) -> dict[str, Any]:
    plain = {"stopped": None, "status": 0, "clean": True, "records": records, "stdout": "", "stderr": ""}
    return plain | {"wall_seconds": 0.1, "cpu_seconds": 0.1, "peak_memory_mb": 9.0} | changes


def verdict_of(records: str, count: int, limits: Limits = USUAL, **changes: Any) -> Verdict:
    run = Run(list(range(count)), nonce=NONCE)
    run_from_report(run, report(records, **changes), limits)
    return merge_runs([run], count)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_records_cut_at_any_point_pass_only_what_was_recorded(outcomes, data):
    lines = [f"{NONCE} {'P' if ok else 'F'} {k} " + ("" if ok else "AssertionError") for k, ok in enumerate(outcomes)]
    kept = data.draw(st.integers(0, len(lines)))
    verdict = verdict_of("".join(line + "\n" for line in lines[:kept]), len(outcomes))
    assert [t.passed for t in verdict.tests] == outcomes[:kept] + [False] * (len(outcomes) - kept)
    assert verdict.status == "exited"  # no `D`
    whole = verdict_of("".join(line + "\n" for line in [*lines, f"{NONCE} D 0 "]), len(outcomes))
    assert whole.status == ("passed" if all(outcomes) else "failed")


@given(st.text(st.sampled_from("0123456789abcdefPFDSEMXG \n"), max_size=80) | st.text(max_size=80))
def test_what_does_not_know_the_nonce_passes_nothing(text):
    verdict = verdict_of(text, 2)
    assert verdict.status in ("protocol", "exited")
    assert not any(t.passed for t in verdict.tests)
    guessed = verdict_of("fedcba9876543210 P 0 \n" + text, 2)
    assert (guessed.status, guessed.fraction_passed) == ("protocol", 0)


def test_repeated_reordered_or_surplus_records_are_refused():
    for indices in ([0, 0], [1, 0], [0, 2], [1], [0, 1, 2]):
        verdict = verdict_of("".join(f"{NONCE} P {k} \n" for k in indices), 2)
        assert verdict.status == "protocol", indices
        assert verdict.fraction_passed == 0
    script = Run([0], io=IOTest("", ""), script=True, nonce=NONCE)
    run_from_report(script, report(f"{NONCE} P 0 \n"), Limits())
    assert (script.status, script.tests) == ("protocol", [])


@given(st.text(max_size=200))
def test_details_come_back_as_they_were(detail):
    line = f"{NONCE} F 0 {detail}".encode("unicode_escape").decode("ascii") + f"\n{NONCE} D 0 \n"
    assert verdict_of(line, 1).tests == [TestResult(False, detail)]


def test_signals():
    for number, status in (
        (signal.SIGSEGV, "crashed"),
        (signal.SIGKILL, "killed"),
        (signal.SIGXCPU, "timeout"),
        (63, "killed"),
    ):
        assert os.WIFSIGNALED(int(number))
        assert verdict_of("", 1, status=int(number)).status == status
    assert verdict_of("", 1, Limits(cpu_seconds=1), status=int(signal.SIGKILL), cpu_seconds=1.02).status == "timeout"


def test_what_could_not_be_confined_or_killed_is_not_judged():
    assert verdict_of(f"{NONCE} S 0 OSError: x\n", 1).status == "sandbox_error"
    assert verdict_of(f"{NONCE} P 0 \n{NONCE} D 0 \n", 1, clean=False).status == "sandbox_error"


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")), max_size=4))
def test_output_is_compared_without_trailing_white_space(lines):
    run = Run([0], io=IOTest("", "".join(f"{line} \t\n" for line in lines) + "\n"), script=True, nonce=NONCE)
    run_from_report(run, report(f"{NONCE} D 0 \n", stdout="\n".join(line.rstrip() for line in lines)), Limits())
    assert run.status == "passed"
    run.io, run.status = IOTest("", "\n".join([*lines, "!"])), "passed"
    run_from_report(run, report(f"{NONCE} D 0 \n", stdout="\n".join(lines)), Limits())
    assert (run.status, run.tests[0].passed) == ("failed", False)
