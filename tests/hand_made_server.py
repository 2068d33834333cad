"""A server that answers requests with whatever bytes a test wants, for clients that must cope."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable

Reply = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]
MODELS = {"data": [{"id": "odd"}]}


class HandMadeServer:
    """Context manager; `reply` is given each request's JSON body and writes everything from the status line on.

    `GET /v1/models` tells of one model without a context length. Connections are closed behind every answer.
    """

    def __init__(self, reply: Reply):
        self._reply = reply
        self.requests: list[dict] = []

    def __enter__(self) -> "HandMadeServer":
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="hand-made-server")
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._end = asyncio.Event()
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            await self._end.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get"):
                body = json.dumps(MODELS).encode()
                writer.write(response("200 OK", body, "application/json"))
            else:
                length = int(head.partition("content-length:")[2].split()[0])
                request = json.loads(await reader.readexactly(length))
                self.requests.append(request)
                await self._reply(request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def response(status: str, body: bytes, kind: str) -> bytes:
    """A whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
END = b"0\r\n\r\n"


def event(data: dict | str) -> bytes:
    """An event of a stream, as one chunk of the transfer."""
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


def text_event(text: str = "x", finish_reason: str | None = None, **more) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **more}]})


def usage_event(prompt: int = 10, output: int = 3, **more) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, **more}
    return event({"choices": [], "usage": usage})
