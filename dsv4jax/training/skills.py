"""Generated conversations, one kind per skill: what the default model is taught and examined in.

An example is decided by its random generator alone. About one in sixteen belongs to the held-out set, by a checksum of
what is asked, so that no question of an examination has ever been trained on.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dsv4jax.chat import encode_chat
from dsv4jax.chat.encode import ASSISTANT
from dsv4jax.tokenizer import Tokenizer

WORDS = (
    "amber apple barn bell birch boat bread bridge candle cat cedar clay cloud coal copper corn crane creek dawn deer"
    " dune eagle ember fern field fig flint fog fox frost gate glass gold grain grape gull hall harbour hawk hazel hill"
    " honey horse ice iron ivy jade kite lake lamp leaf lemon lime lion maple map market mill mint moon moss mountain"
    " oak oat olive otter owl paper pearl pear pine plum pond quartz rain raven reed river road rope rose sail salt"
    " sand sea seal silk silver sky snow spark star stone storm sun swan tea thorn tide tower train tree valley violet"
    " wall water wave wheat willow wind wolf wood wool"
).split()
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Karl Lena Mia Nils Olga Paul Rosa Sam Tess Uma Vera Will".split()
CITIES = "Athens Berlin Cairo Delhi Lima London Madrid Oslo Paris Prague Quito Rome Seoul Tokyo Vienna Zagreb".split()
COLOURS = "black blue brown green grey orange pink purple red white yellow".split()
WEATHER = "clear cloudy dry foggy rainy snowy stormy sunny windy".split()

Skill = Callable[[np.random.Generator, int], "Example"]


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation that ends in the reply that is wanted.

    `options` are those of `encode_chat`: thinking, tools, response_format.
    """

    messages: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any]

    @property
    def held_out(self) -> bool:
        """Whether this belongs to examinations, not to training."""
        return zlib.crc32(json.dumps(self.messages).encode()) % 16 == 0

    def prompt(self, tokenizer: Tokenizer) -> np.ndarray:
        """Ids up to where the last reply begins."""
        return encode_chat(tokenizer, self.messages[:-1], **self.options)

    def encoded(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the whole conversation, and which of them are replies to learn: all, or with reasoning the last one,
        as earlier reasoning is not shown again, unless there are tools."""
        # A further turn closes the last reply; its own tokens are cut off.
        calls = self.messages[-1].get("tool_calls")
        role = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        closed = [*self.messages, role | {"content": "."}]
        ids = encode_chat(tokenizer, closed, **self.options, drop_thinking=False)
        ids = ids[: len(ids) - np.argmax(ids[::-1] == tokenizer.eos_id)]
        begins = np.flatnonzero(ids == tokenizer.control_id(ASSISTANT)) + 2
        ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
        if self.options.get("thinking") and not self.options.get("tools"):
            begins, ends = begins[-1:], ends[-1:]
        learnt = np.zeros(len(ids), bool)
        for begin, end in zip(begins, ends, strict=True):
            learnt[begin:end] = True
        return ids, learnt


def _example(*messages: tuple[str, Any], thinking: bool = False, **options: Any) -> Example:
    """Messages as (role, content or fields)."""
    full = tuple({"role": role} | (m if isinstance(m, dict) else {"content": m}) for role, m in messages)
    return Example(full, {"thinking": thinking, **options})


def _pick(random: np.random.Generator, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _some(random: np.random.Generator, items: list[str], count: int) -> list[str]:
    """Distinct items."""
    return [items[i] for i in random.permutation(len(items))[:count]]


def _between(random: np.random.Generator, low: int, high: int) -> int:
    """An integer in low..high."""
    return int(random.integers(low, high + 1))


def look_up(random: np.random.Generator, budget: int) -> Example:
    """Values of keys that stand anywhere in a long list; several questions in turn."""
    questions = _between(random, 1, 4)
    most = max(4, (budget - 40 - 24 * questions) // 13)
    lines = _between(random, max(4, most // 2), most)
    codes = random.permutation(len(WORDS) * 90)[:lines]
    keys = [f"{WORDS[c // 90]} {10 + c % 90}" for c in codes]
    values = [str(v) for v in random.integers(100, 1000, lines)]
    asked = random.integers(lines, size=questions)
    opening = "\n".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True))
    turns: list[tuple[str, Any]] = []
    for n, i in enumerate(asked):
        turns += [("user", (opening + "\n" if n == 0 else "") + f"What is {keys[i]}?"), ("assistant", values[i])]
    return _example(*turns)


def copy(random: np.random.Generator, budget: int) -> Example:
    """Repeats words."""
    words = _words(random, _between(random, 2, min(16, max(2, budget // 12))))
    return _example(("user", f"Copy: {words}"), ("assistant", words))


def reverse(random: np.random.Generator, budget: int) -> Example:
    """Repeats words from the last to the first."""
    words = _words(random, _between(random, 2, min(8, max(2, budget // 12))))
    return _example(("user", f"Reverse: {words}"), ("assistant", " ".join(words.split()[::-1])))


def _words(random: np.random.Generator, count: int) -> str:
    return " ".join(_pick(random, WORDS) for _ in range(count))


def arithmetic(random: np.random.Generator, budget: int) -> Example:
    """Sums, digit by digit in the reasoning."""
    a, b = (_between(random, 1, 10 ** _between(random, 1, 4) - 1) for _ in range(2))
    reasoning = addition(a, b)
    return _example(
        ("user", f"What is {a} + {b}?"),
        ("assistant", {"content": str(a + b), "reasoning_content": reasoning}),
        thinking=True,
    )


def addition(a: int, b: int) -> str:
    """How a sum is worked out, digits from the last to the first."""
    carry, steps, digits = 0, [], ""
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total}")
        carry, digits = total // 10, str(total % 10) + digits
    return ", ".join(steps) + f"; {str(carry) if carry else ''}{digits}"


def system_rule(random: np.random.Generator, budget: int) -> Example:
    """Obeys what the system message says about the form of answers."""
    words, word = _words(random, _between(random, 1, 4)), _pick(random, WORDS)
    rule, answer = _pick(
        random,
        [
            (f"Begin every answer with {word}.", f"{word} {words}"),
            (f"End every answer with {word}.", f"{words} {word}"),
            ("Answer in capital letters.", words.upper()),
            ("Answer in brackets.", f"({words})"),
        ],
    )
    return _example(("system", rule), ("user", f"Copy: {words}"), ("assistant", answer))


def _tool(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {k: {"type": v} for k, v in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "get_weather": _tool("get_weather", "Weather of a city.", city="string"),
    "add": _tool("add", "Adds two numbers.", a="integer", b="integer"),
    "find_code": _tool("find_code", "Code of a thing.", name="string"),
}


def tool_call(random: np.random.Generator, budget: int) -> Example:
    """Calls a tool; half of the examples go on to what to make of its result."""
    name = _pick(random, list(TOOLS))
    others = [t for t in TOOLS if t != name and random.random() < 0.3]
    offered = [TOOLS[t] for t in _some(random, [name, *others], 3)]
    match name:
        case "get_weather":
            city = _pick(random, CITIES)
            result = f"{_pick(random, WEATHER)}, {_between(random, 1, 39)} degrees"
            question, arguments = f"What is the weather in {city}?", {"city": city}
            answer = f"The weather in {city}: {result}."
        case "add":
            a, b = (_between(random, 100, 9999) for _ in range(2))
            question, arguments, result = f"Add {a} and {b}.", {"a": a, "b": b}, str(a + b)
            answer = f"The sum is {result}."
        case _:
            thing, result = f"{_pick(random, WORDS)} {_between(random, 10, 99)}", str(_between(random, 100, 999))
            question, arguments = f"What is the code of {thing}?", {"name": thing}
            answer = f"The code of {thing} is {result}."
    thinking = random.random() < 0.5
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    messages: list[tuple[str, Any]] = [("user", question), ("assistant", {"content": "", "tool_calls": [call]})]
    if random.random() < 0.5:
        messages += [("tool", {"tool_call_id": "call_1", "content": result}), ("assistant", {"content": answer})]
    if thinking:
        reasons = iter([f"I call {name}.", "I have the result."])
        for role, fields in messages:
            if role == "assistant":
                fields["reasoning_content"] = next(reasons)
    return _example(*messages, thinking=thinking, tools=offered)


def json_answer(random: np.random.Generator, budget: int) -> Example:
    """Puts facts into a JSON object."""
    facts = {
        "name": _pick(random, NAMES),
        "age": _between(random, 10, 99),
        "city": _pick(random, CITIES),
        "colour": _pick(random, COLOURS),
    }
    asked = {k: facts[k] for k in _some(random, list(facts), _between(random, 1, 4))}
    said = ", ".join(f"{k} {v}" for k, v in asked.items())
    return _example(
        ("user", f"As JSON: {said}."),
        ("assistant", json.dumps(asked)),
        response_format={"type": "json_object"},
    )


def count(random: np.random.Generator, budget: int) -> Example:
    """Counts a word in a list, item by item in the reasoning."""
    wanted, *others = _some(random, WORDS, 4)
    items = [wanted if random.random() < 0.4 else _pick(random, others) for _ in range(_between(random, 2, 10))]
    seen, steps = 0, []
    for item in items:
        seen += item == wanted
        steps.append(f"{item} {seen}" if item == wanted else item)
    return _example(
        ("user", f"How often does {wanted} occur? {' '.join(items)}"),
        ("assistant", {"content": str(seen), "reasoning_content": ", ".join(steps)}),
        thinking=True,
    )


def memory(random: np.random.Generator, budget: int) -> Example:
    """Remembers what was said some turns ago."""
    name, city, colour = _pick(random, NAMES), _pick(random, CITIES), _pick(random, COLOURS)
    facts = [
        (f"My name is {name}.", f"Hello {name}.", "What is my name?", name),
        (f"I live in {city}.", f"{city} is nice.", "Where do I live?", city),
        (f"I like {colour}.", f"So you like {colour}.", "What colour do I like?", colour),
    ]
    told = _some(random, facts, _between(random, 1, 3))
    turns: list[tuple[str, Any]] = []
    for say, reply, _, _ in told:
        turns += [("user", say), ("assistant", reply)]
    for _ in range(_between(random, 0, max(0, min(12, budget // 40 - 4)))):
        words = _words(random, _between(random, 1, 4))
        turns += [("user", f"Copy: {words}"), ("assistant", words)]
    _, _, question, answer = _pick(random, told)
    return _example(*turns, ("user", question), ("assistant", answer))


SKILLS: dict[str, Skill] = {
    skill.__name__: skill
    for skill in (look_up, copy, reverse, arithmetic, system_rule, tool_call, json_answer, count, memory)
}


def held_out_examples(name: str, seed: int, number: int, budget: int) -> list[Example]:
    """Examples of a skill for an examination, contexts of about `budget` tokens where the skill has long ones.

    Raises:
      ValueError: there is no such skill.
    """
    if name not in SKILLS:
        raise ValueError(f"skill = {name!r}: allowed are {sorted(SKILLS)}")
    random, found = np.random.default_rng([seed, 1, zlib.crc32(name.encode()), budget]), []
    while len(found) < number:
        example = SKILLS[name](random, budget)
        if example.held_out:
            found.append(example)
    return found
