"""The child of `mrl.rewards.verifier`: imports one function, gives up what it does not need, answers questions.

python -m mrl.rewards.verifier_child module:function
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
REFUSED = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "os.startfile",
        "os.kill",
        "os.killpg",
    ),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate"),
    *("os.putenv", "os.unsetenv", "os.chdir", "pty.spawn", "shutil.rmtree", "shutil.move", "shutil.copyfile"),
    *("subprocess.Popen", "socket.", "ctypes.", "sys.addaudithook", "sys.setprofile", "sys.settrace"),
)
"""What no verifier does, but an evaluated answer might: audit events, or their beginnings where they end in a dot."""


def main() -> None:
    """Answer one question per line, as `{"value": …}` or `{"error": …}`."""
    module, _, name = sys.argv[1].partition(":")
    home = importlib.import_module(module)
    function = getattr(home, name)
    for library in home.LIBRARIES:  # now: what they load, they load from files, and with programs of their own
        importlib.import_module(library)
    # Questions and answers go by descriptors that nothing else knows: what a library or an answer prints goes to
    # stderr, and `exit()` closes a standard input that nobody reads.
    questions, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _say(out, {"ready": True})
    limited = False
    for line in questions:
        question = json.loads(line)
        if not limited:
            _limit()
            limited = True
        try:
            answer = {"value": function(**question)}
        except SystemExit:
            answer = {"value": 0.0}  # evaluated text that tries to leave is no answer
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        _say(out, answer)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    refused = event in REFUSED or event.startswith(tuple(name for name in REFUSED if name.endswith(".")))
    # A file is opened for writing with a mode, or, by os.open, with flags.
    writes = event == "open" and (set(str(args[1] or "r")) & set("wax+") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR))
    if refused or writes:
        raise PermissionError(f"{event} is not for verifiers")


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
