"""A language model as judge, by a rubric with two criteria, cached and counted. It runs offline: instead of a language
model a stand-in of a few lines judges, a server that speaks OpenAI's chat completions and counts words.

python examples/judge.py

With a real judge leave the stand-in out and say where it is, e.g.
    Judge(model="gpt-4o-mini", base_url="https://api.openai.com/v1", api_key_env="OPENAI_API_KEY", rubric=…)
A trained reward model is simpler: reward_funcs="OWNER/REWARD-MODEL", its Hub id or folder.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mrl import MRLTrainer
from mrl.rewards.judge import Judge

RUBRIC = """The task was: {prompt}
Judge this answer to it:
{completion}"""
CRITERIA = {"code": {"about": "Is it Python code that defines a function?", "weight": 2}, "short": "Is it short?"}


class StandIn(BaseHTTPRequestHandler):
    """No model: `code` for a `def`, `short` by the number of words."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = request["messages"][1]["content"].partition("Judge this answer to it:")[2]
        scores = {"code": 10 if "def " in answer else 0, "short": max(0, 10 - len(answer.split()) // 4)}
        text = json.dumps({"reason": "words were counted", "scores": scores})
        usage = {"prompt_tokens": len(str(request["messages"])) // 4, "completion_tokens": len(text) // 4}
        body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=5)
    steps = parser.parse_args().max_steps

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judge = Judge(
        model="stand-in",
        base_url=f"http://127.0.0.1:{server.server_port}/v1",
        rubric=RUBRIC,
        criteria=CRITERIA,
        prompt_price=0.15,  # of a million tokens
        completion_price=0.60,
    )
    result = MRLTrainer(
        model="starter",
        dataset_name="tiny-code",
        reward_funcs=[judge],
        max_steps=steps,
        batch_size=4,
        num_generations=8,
        max_completion_length=64,
    ).train()
    judged = {name.removeprefix("reward/judge/"): value for name, value in result.metrics.items()}
    print(f"code {judged['code/mean']:.2f}, short {judged['short/mean']:.2f} in the last step")
    print(f"{judged['requests']:.0f} requests, {judged['prompt_tokens']:.0f} prompt tokens, ${judged['cost']:.4f}")
    server.shutdown()
