"""Loads a server with streams, aborts, disconnects and bad requests, and checks that nothing is left behind.

python scripts/soak_server.py --minutes 5 --streams 200

Starts scripts/serve.py itself; flags after `--` go to it. Ends with an error unless every request ended in a defined
state, every page came back, and the server's memory stayed flat.
"""

import asyncio
import collections
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import command_line
from absl import flags

_MINUTES = flags.DEFINE_float("minutes", 3.0, "How long.", 0.0)
_STREAMS = flags.DEFINE_integer("streams", 200, "Requests open at the same time.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the mix of requests.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the result.")

_WORDS = "the of a model page window token latent cache slot step key index expert layer draft verify".split()


class _Client:
    """Raw HTTP/1.1 over one connection per request, so that it can be cut anywhere."""

    def __init__(self, port: int):
        self.port = port
        self.ends: collections.Counter[str] = collections.Counter()
        self.tokens = 0

    async def one(self, rng: random.Random) -> None:
        """One random request to its random end."""
        kind, path, body = _request(rng)
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            name = f"soak-{rng.getrandbits(64):x}"
            payload = json.dumps(body).encode()
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nX-Request-Id: {name}\r\n"
                f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
                + payload
            )
            fate = rng.choices(["finish", "disconnect", "abort"], [6, 3, 1])[0]
            if fate == "disconnect":
                await asyncio.wait_for(reader.read(rng.choice([1, 400, 4000])), rng.uniform(0.05, 20))
                self.ends["disconnected by the client"] += 1
                return
            if fate == "abort":
                await asyncio.sleep(rng.uniform(0, 10))
                await self._abort(name)
            self.ends[_outcome(kind, await reader.read(), self)] += 1
        except TimeoutError:
            self.ends["disconnected by the client"] += 1
        except OSError as error:
            self.ends[f"connection failed: {type(error).__name__}"] += 1
        finally:
            if writer is not None:
                writer.close()

    async def _abort(self, name: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        payload = json.dumps({"request_ids": [name]}).encode()
        writer.write(
            f"POST /abort_requests HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        await reader.read()
        writer.close()


def _request(rng: random.Random) -> tuple[str, str, dict]:
    shared = " ".join(_WORDS * rng.randint(0, 6))
    text = f"{shared} {' '.join(rng.choices(_WORDS, k=rng.randint(1, 60)))}"
    body = {
        "max_tokens": rng.randint(1, 48),
        "stream": rng.random() < 0.7,
        "seed": rng.randint(0, 2**40),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
    }
    if body["temperature"] and rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        body["stop"] = rng.sample(_WORDS, 2)
    if rng.random() < 0.1:
        body |= {"frequency_penalty": 1.0, "top_p": 0.9, "logit_bias": {"5": -10}}
    if rng.random() < 0.05:
        body["temperature"] = 7
        return "bad", "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.4:
        return "completion", "/v1/completions", body | {"prompt": text}
    if rng.random() < 0.2:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body["thinking"] = {"type": "disabled"}
    return "chat", "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


def _outcome(kind: str, answer: bytes, client: _Client) -> str:
    """Names how a request ended; anything unexpected begins with "undefined"."""
    status = int(answer[9:12]) if answer[:5] == b"HTTP/" else 0
    if status == 429:
        return "turned away: 429"
    if kind == "bad":
        return "refused: 400" if status == 400 else f"undefined: bad request got {status}"
    if status == 400 and b"request_aborted" in answer:
        return "aborted: 400"
    if status != 200:
        return f"undefined: status {status}"
    reasons = set(re.findall(rb'"finish_reason": ?"(\w+)"', answer))
    client.tokens += sum(map(int, re.findall(rb'"completion_tokens": ?(\d+)', answer)))
    if b"data: " in answer and b"data: [DONE]" not in answer:
        return "undefined: a stream without an end"
    if b'"error"' in answer and not reasons:
        return "ended by an error event"
    return "finished: " + ",".join(sorted(r.decode() for r in reasons)) if reasons else "undefined: no finish reason"


def _status(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=30) as answer:
        return json.load(answer)["stats"]


def _resident(pid: int) -> float:
    """MiB of memory that a process occupies."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


async def _soak(port: int, pid: int) -> dict:
    client, rng = _Client(port), random.Random(_SEED.value)
    end = time.monotonic() + 60 * _MINUTES.value
    memory, running = [], []

    async def worker(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < end:
            await client.one(own)

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(_resident(pid))
            running.append((await asyncio.to_thread(_status, port))["running"])
            await asyncio.sleep(2)

    await asyncio.gather(watch(), *(worker(rng.getrandbits(32)) for _ in range(_STREAMS.value)))
    for _ in range(120):
        status = await asyncio.to_thread(_status, port)
        if status["running"] == status["waiting"] == 0:
            break
        await asyncio.sleep(0.5)
    quarter = len(memory) // 4
    return {
        "minutes": _MINUTES.value,
        "streams": _STREAMS.value,
        "requests": client.ends.total(),
        "ends": dict(client.ends.most_common()),
        "tokens_in_finished_answers": client.tokens,
        "mean_running": sum(running) / max(1, len(running)),
        "resident_mib_second_quarter": max(memory[quarter : 2 * quarter], default=0),
        "resident_mib_last_quarter": max(memory[3 * quarter :], default=0),
        "status_at_the_end": status,
    }


def main(server_flags: list[str]) -> None:
    serve = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(serve), "--port=0", *server_flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True) as server:
        try:
            port = None
            for line in server.stderr:
                if found := re.search(r"listening on .*:(\d+)", line):
                    port = int(found[1])
                    break
            if port is None:
                sys.exit("the server did not start")
            log = asyncio.to_thread(collections.deque, server.stderr, 0)  # keeps the pipe empty

            async def run() -> dict:
                reading = asyncio.create_task(log)
                result = await _soak(port, server.pid)
                server.terminate()
                await reading
                return result

            result = asyncio.run(run())
        finally:
            server.terminate()
        result["exit_status"] = server.wait(timeout=60)
    print(json.dumps(result, indent=1))
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n")
    status = result["status_at_the_end"]
    problems = [f"{count} x {name}" for name, count in result["ends"].items() if name.startswith(("undefined", "conn"))]
    if status["running"] or status["waiting"] or status["used_pages"]:
        problems.append(f"something is still held: {status}")
    if result["resident_mib_last_quarter"] > 1.1 * result["resident_mib_second_quarter"] + 20:
        problems.append("memory grew")
    if result["exit_status"]:
        problems.append(f"the server ended with status {result['exit_status']}")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    command_line.run(main, arguments="flags of serve.py")
