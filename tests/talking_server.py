"""A real server on loopback whose engine answers by what the last message says."""

import contextlib
import dataclasses

from fake_engine import engine_stats
from server_api import ScriptedEngine, context, text_ids

from dsv4jax.server.app import create_app
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.metrics import PrometheusObserver
from dsv4jax.server.run import BackgroundServer

DSML = "｜DSML｜"
EOS = "<｜end▁of▁sentence｜>"
CALL = [
    *("\n\n<", DSML, " calls>\n<", DSML, ' invoke name="weather">\n<', DSML, ' parameter name="city" string="true">'),
    *("Ulm", "</", DSML, " parameter>\n<", DSML, ' parameter name="days" string="false">', "3", "</", DSML),
    *(" parameter>\n</", DSML, " invoke>\n</", DSML, " calls>", EOS),
]
THOUGHT = "Let me see."
ANSWERS = {
    "weather": ["Looking.", *CALL],
    "json": ['{"name": "Ada", ', '"age": 36}', EOS],
    "long": ["word " * 400, EOS],
}
ANSWER = "Grüße aus 日本 🙂."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class TalkingEngine(ScriptedEngine):
    """Reasons with `THOUGHT`, then gives the first of `ANSWERS` whose word the prompt's last message contains."""

    def __init__(self, tokenizer, **options):
        super().__init__(self._script, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size, **options)
        self._tokenizer = tokenizer
        self.refusals: list[Exception] = []  # of the next requests, one each

    def check(self, *requests):
        if self.refusals:
            raise self.refusals.pop(0)
        super().check(*requests)

    def stats(self):
        return engine_stats(running=self.open)

    async def drain(self, timeout):
        pass

    def _script(self, request, index):
        asked, _, header = self._tokenizer.token_bytes(request.prompt.tolist()).decode().rpartition("<｜Assistant｜>")
        if not asked:
            return text_ids(self._tokenizer, f"choice {index} ", "goes on and on " * 40)
        last = asked.rpartition("<｜User｜>")[2]
        answer = next((answer for word, answer in ANSWERS.items() if word in last), [ANSWER, EOS])
        thought = [THOUGHT, "</think>"] if header.startswith("<think>") and "</think>" not in header else []
        return text_ids(self._tokenizer, *thought, *answer)


@contextlib.contextmanager
def serving(tokenizer, grammars=None, sizes=(2, 1), limit=4096, **config):
    """A running server; its attribute `engine` is the engine."""
    engine = TalkingEngine(tokenizer, sizes=sizes, limit=limit)
    server_context = dataclasses.replace(context(tokenizer, grammars=grammars), engine=engine)
    observer = PrometheusObserver("flash", engine.max_model_len, {"block_size": 64})
    app = create_app(server_context, ServerConfig(port=0, **config), observer)
    with BackgroundServer(app) as server:
        server.engine = engine
        yield server
