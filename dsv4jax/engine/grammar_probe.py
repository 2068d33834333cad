"""Tries out one grammar in a process of its own: run as a script by `dsv4jax.engine.grammar`.

A hostile grammar can overflow the stack of its compiler or keep it busy for minutes, which must not happen to the
server. This file imports nothing of the project, so that the process starts fast.

Input (standard input, JSON): `vocab_size`, `eos_id`, `control` (spelling of each control token by id), and `format` and
`text` as `llguidance.grammar_from` takes them ("json_schema", "regex", "lark", "ebnf" or "llguidance"). Output
(standard output, JSON): `grammar` in the compiler's own form, and `error`, empty if the grammar is usable.
"""

import json
import resource
import sys
import threading

import llguidance

# Half of a usual thread's, so that what passes here has room where it is used.
STACK_BYTES = 4 << 20
MEMORY_BYTES = 2 << 30
STEPS = 16


class ByteTokenizer:
    """One token per byte, and the control tokens under their own ids: enough to compile any grammar."""

    def __init__(self, vocab_size: int, eos_id: int, control: dict[int, str]):
        self.eos_token_id = self.bos_token_id = eos_id
        self.special_token_ids = sorted(control)
        self.tokens = [b""] * vocab_size
        for token_id, spelling in control.items():
            self.tokens[token_id] = spelling.encode()
        ordinary = (i for i in range(vocab_size) if i not in control)
        self.byte_ids = [next(ordinary) for _ in range(256)]
        for byte, token_id in enumerate(self.byte_ids):
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes | str) -> list[int]:
        return [self.byte_ids[b] for b in (text.encode() if isinstance(text, str) else text)]


def probe(request: dict) -> dict[str, str]:
    """Compiles the grammar and takes a few steps in it."""
    try:
        grammar = llguidance.grammar_from(request["format"], request["text"])
    except ValueError as error:
        return {"grammar": "", "error": str(error)}
    control = {int(i): spelling for i, spelling in request["control"].items()}
    tokenizer = ByteTokenizer(request["vocab_size"], request["eos_id"], control)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokenizer)),
        grammar,
        log_level=0,
        limits=llguidance.LLParserLimits(verbose_errors=False),
    )
    for _ in range(STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << request["eos_id"])
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    error = matcher.get_error()
    return {"grammar": grammar, "error": "no text matches it" if error.startswith("NoExtension") else error}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = json.load(sys.stdin)
    answers: list[dict[str, str]] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: answers.append(probe(request)))
    thread.start()
    thread.join()
    json.dump(answers[0], sys.stdout)


if __name__ == "__main__":
    main()
