"""Grammars of replies: JSON schema, regular expression, choice, context-free grammar, tool calls (http_api section 7).

`GrammarCompiler` turns a frozen description into a `CompiledGrammar`, of which every choice gets its own cheap state.
The work is done by `llguidance`; a control token never matches text of a grammar, whatever its spelling.
"""

import collections
import dataclasses
import json
import subprocess
import sys
import threading
from typing import Any

import llguidance
import numpy as np

from dsv4jax.engine import grammar_probe
from dsv4jax.engine.json_schema import Document, GrammarError, check_values_end, shown
from dsv4jax.engine.token_mask import Grammar, GrammarState, MaskError, Words
from dsv4jax.engine.tool_grammar import OPENING, Tool, lark_string, tool_calls_lark
from dsv4jax.tokenizer import Tokenizer

DSML = "｜DSML｜"

# Hostile input is refused by the size of what the request says and the depth of its JSON first, then by what compiling
# it in a process of its own takes.
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 64
PROBE_SECONDS = 5.0
MAX_PROBES = 4

# Blanks between JSON tokens are matched at most once per place: without a bound a model may go on for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


@dataclasses.dataclass(frozen=True)
class JsonSchema:
    """Replies are JSON of `schema`, itself JSON text. Keywords that cannot be enforced are refused."""

    schema: str


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """Replies are any JSON object."""


@dataclasses.dataclass(frozen=True)
class Regex:
    """Whole replies match `pattern`: the syntax of Rust's `regex`, without look-around and back references."""

    pattern: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """Replies are one of `choices`."""

    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ContextFreeGrammar:
    """Replies are sentences of a grammar in the Lark dialect of `llguidance` or in GBNF (rules with `::=`)."""

    text: str


@dataclasses.dataclass(frozen=True)
class StructuralTag:
    """Free text in which a trigger opens a tag: JSON text of `structures` (`begin`, `schema`, `end`) and `triggers`.

    As soon as a trigger was written, one of the beginnings that start with it must follow, then JSON of its schema,
    then its end.
    """

    tag: str


@dataclasses.dataclass(frozen=True)
class ToolSchema:
    """A tool that may be called; `parameters` is the JSON text of an object schema."""

    name: str
    parameters: str = "{}"


@dataclasses.dataclass(frozen=True)
class ToolCalls:
    """Tool calls, see `tool_calls_lark` for what is enforced in them.

    Keywords that cannot be enforced are ignored, so that a tool is never refused for its annotations.

    Attributes:
      tools: the tools that may be called; a named tool choice lists that one only.
      required: the answer is a block of calls; otherwise it is free text until a block begins.
      parallel: more than one call may be made.
      inside_block: the prompt ends with the opening tag of the block and its line break (chat section 2.6).
    """

    tools: tuple[ToolSchema, ...]
    required: bool = False
    parallel: bool = True
    inside_block: bool = False


GrammarSpec = JsonSchema | JsonObject | Regex | Choice | ContextFreeGrammar | StructuralTag | ToolCalls


class CompiledGrammar(Grammar):
    """The parser at the places where a reply may enter the grammar."""

    def __init__(
        self,
        answer: llguidance.LLMatcher | None,
        calls: llguidance.LLMatcher | None,
        call_marker: int | None,
        tag_openers: frozenset[int],
        eos_id: int,
    ):
        self.free_answer = answer is None
        self.call_marker = call_marker if calls is not None else None
        self.tag_openers = tag_openers if calls is not None else frozenset()
        self._answer = answer
        self._calls = calls
        self._eos_id = eos_id

    def answer(self) -> GrammarState:
        """The state at the first token of the answer; not to be called with `free_answer`."""
        assert self._answer is not None
        return MatcherState(self._answer.deep_copy(), self._eos_id)

    def calls(self) -> GrammarState:
        """The state after `call_marker`; not to be called without one."""
        assert self._calls is not None
        return MatcherState(self._calls.deep_copy(), self._eos_id)


class MatcherState(GrammarState):
    """Where the parser stands in one choice."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_id: int):
        self._matcher = matcher
        self._eos_id = eos_id

    def fill(self, words: Words) -> None:
        """Writes the mask of the next token; end of sentence is in it only where the grammar may end.

        Raises:
          MaskError: the grammar failed, for instance by its limit on work for one token.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        word, bit = self._eos_id // 32, np.uint32(1 << self._eos_id % 32)
        if words[word] & bit and not self._matcher.is_accepting():
            words[word] &= ~bit

    def push(self, token_id: int) -> None:
        """Takes a token.

        Raises:
          MaskError: the grammar does not allow it, or failed.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def copy(self) -> "MatcherState":
        """A state that goes its own way from here."""
        return MatcherState(self._matcher.deep_copy(), self._eos_id)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MaskError(f"the grammar failed: {_one_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest ones. Thread safe."""

    def __init__(self, tokenizer: Tokenizer, cache_size: int = 64):
        """Prepares the vocabulary, which takes about a second for a large one.

        Raises:
          ValueError: the tokenizer has no `｜DSML｜`.
        """
        self._tokenizer = tokenizer
        self._marker = tokenizer.control_id(DSML)
        self._control = {i: token.content for i, token in tokenizer._tokenizer.get_added_tokens_decoder().items()}
        tokens = [tokenizer.token_bytes([i]) for i in range(tokenizer.vocab_size)]
        self._tag_openers = frozenset(i for i, text in enumerate(tokens) if text.endswith(b"<"))
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, tokens, sorted(self._control)))
        )
        self._cache: collections.OrderedDict[GrammarSpec, CompiledGrammar] = collections.OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._probes = threading.BoundedSemaphore(MAX_PROBES)

    def compile(self, spec: GrammarSpec, field: str) -> CompiledGrammar:
        """The grammar of `spec`: from the cache, or compiled, usually in a fraction of a second.

        One that takes longer than `PROBE_SECONDS` is refused; as the server compiles what passed once more, the longest
        takes about twice as long.

        Blocks, and waits for its turn when `MAX_PROBES` others are being tried out: not for an event loop.

        Args:
          spec: what replies look like.
          field: the request's field that `spec` comes from, for error messages.

        Raises:
          GrammarError: the grammar is malformed, too large, or uses what is not supported.
        """
        with self._lock:
            if spec in self._cache:
                self._cache.move_to_end(spec)
                return self._cache[spec]
        grammar = self._compile(spec, field)
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, spec: GrammarSpec, field: str) -> CompiledGrammar:
        form, text = _grammar_text(spec, field, self._marker)
        _check_unicode(text, field)
        matcher = llguidance.LLMatcher(
            self._vocabulary,
            self._probed(form, text, field),
            log_level=0,
            limits=llguidance.LLParserLimits(verbose_errors=False),
        )
        if matcher.is_error():
            raise GrammarError(field, _one_line(matcher.get_error()))
        if not isinstance(spec, ToolCalls):
            return self._compiled(answer=matcher)
        before_marker = [*self._tokenizer.encode(OPENING).tolist(), self._marker]
        calls = _advanced(matcher, before_marker)
        if spec.inside_block:
            return self._compiled(answer=_advanced(calls, self._tokenizer.encode(" calls>\n").tolist()))
        return self._compiled(answer=matcher if spec.required else None, calls=calls)

    def _compiled(
        self, answer: llguidance.LLMatcher | None, calls: llguidance.LLMatcher | None = None
    ) -> CompiledGrammar:
        for matcher in (answer, calls):
            if matcher is not None:
                matcher.compute_bitmask()  # fills tables that the copies share
        return CompiledGrammar(answer, calls, self._marker, self._tag_openers, self._tokenizer.eos_id)

    def _probed(self, form: str, text: str, field: str) -> str:
        """The grammar in the compiler's own form, once a process of its own has compiled it."""
        request = {
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "control": self._control,
            "format": form,
            "text": text,
        }
        try:
            with self._probes:
                process = subprocess.run(
                    [sys.executable, "-P", grammar_probe.__file__],
                    input=json.dumps(request).encode(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    timeout=PROBE_SECONDS,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise GrammarError(field, f"too complex: it does not compile within {PROBE_SECONDS} s") from None
        if process.returncode != 0:
            raise GrammarError(field, "too complex: compiling it takes too much memory or too deep a recursion")
        answer = json.loads(process.stdout)
        if answer["error"].startswith("panic"):
            raise GrammarError(field, "too large or too complex: the compiler gives up")
        if answer["error"]:
            raise GrammarError(field, _one_line(answer["error"]))
        return answer["grammar"]


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` asks for."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special_token_ids: list[int]):
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).tolist()


def _grammar_text(spec: GrammarSpec, field: str, marker: int) -> tuple[str, str]:
    """Form and text of a grammar for `llguidance.grammar_from`."""
    match spec:
        case JsonSchema(schema):
            value = _load(schema, field)
            if value is True:
                value = {}
            if not isinstance(value, dict):
                raise GrammarError(field, f"a schema is an object or true, not {shown(value)}")
            check_values_end(Document(value, field))
            return "json_schema", _dump({**value, "x-guidance": _JSON_OPTIONS})
        case JsonObject():
            return "json_schema", _dump({"type": "object", "x-guidance": _JSON_OPTIONS})
        case Regex(pattern):
            _check_size(len(pattern), field)
            return "regex", pattern
        case Choice(choices):
            if not choices:
                raise GrammarError(field, "at least one choice is needed")
            _check_size(sum(map(len, choices)), field)
            return "lark", "start: CHOICE\nCHOICE: " + " | ".join(map(lark_string, dict.fromkeys(choices)))
        case ContextFreeGrammar(text):
            _check_size(len(text), field)
            return "ebnf", text
        case StructuralTag(tag):
            return "llguidance", _structural_tag(_load(tag, field), field)
        case ToolCalls(tools, parallel=parallel):
            return "lark", _tool_calls(tools, parallel, field, marker)


def _tool_calls(tools: tuple[ToolSchema, ...], parallel: bool, field: str, marker: int) -> str:
    if not tools:
        raise GrammarError(field, "at least one tool is needed")
    _check_size(sum(len(tool.name) + len(tool.parameters) for tool in tools), field)
    decoded = []
    for i, tool in enumerate(tools):
        parameters = _load(tool.parameters, f"{field}[{i}].parameters")
        if not isinstance(parameters, dict):
            raise GrammarError(f"{field}[{i}].parameters", f"an object is needed, not {shown(parameters)}")
        decoded.append(Tool(tool.name, parameters))
    return tool_calls_lark(decoded, marker, parallel, {**_JSON_OPTIONS, "lenient": True}, field)


def _structural_tag(tag: Any, field: str) -> str:
    if not isinstance(tag, dict) or not {"structures", "triggers"} <= tag.keys():
        raise GrammarError(field, "an object with `structures` and `triggers` is needed; `format` is not supported")
    triggers = tag["triggers"]
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError(f"{field}.triggers", "a list of non-empty strings is needed")
    if not isinstance(tag["structures"], list) or not tag["structures"]:
        raise GrammarError(f"{field}.structures", "a non-empty list is needed")
    structures = []
    for i, structure in enumerate(tag["structures"]):
        path = f"{field}.structures[{i}]"
        if not isinstance(structure, dict):
            raise GrammarError(path, "an object is needed")
        begin, end, schema = structure.get("begin"), structure.get("end"), structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(path, "`begin` and `end` must be strings")
        if not isinstance(schema, dict):
            raise GrammarError(f"{path}.schema", "an object is needed")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"{path}.begin", f"{shown(begin)} starts with none of the triggers {shown(triggers)}")
        check_values_end(Document(schema, f"{path}.schema"))
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
        structures.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return llguidance.StructTag.to_grammar(structures, assume_special=False)


def _load(text: str, field: str) -> Any:
    """Decodes JSON text after checking its size, and checks its depth."""
    _check_size(len(text), field)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(field, f"not JSON: {error}") from error
    level, depth = [value], 0
    while level:
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise GrammarError(field, f"nested deeper than {MAX_DEPTH} levels")
    return value


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_size(characters: int, field: str) -> None:
    if characters > MAX_CHARACTERS:
        raise GrammarError(field, f"{characters} characters are too many: at most {MAX_CHARACTERS} are allowed")


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(field, f"not valid Unicode: {error}") from error


def _advanced(matcher: llguidance.LLMatcher, token_ids: list[int]) -> llguidance.LLMatcher:
    copy = matcher.deep_copy()
    if not copy.consume_tokens(token_ids):
        raise AssertionError(f"the grammar of a call block must begin with {token_ids}: {copy.get_error()}")
    return copy


def _one_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
