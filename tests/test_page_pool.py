"""Pages against a naive model of them, and what page keys promise."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4jax.engine.page_pool import PagePool, PrefixHasher

PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; the model keeps who holds what, and the order in which pages were let go."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.lists = []  # pages of each sequence
        self.key_of = {}  # published pages
        self.kept = []  # released pages with a key, the next to be given up first

    def holders(self):
        return collections.Counter(page for pages in self.lists for page in pages)

    @rule(count=st.integers(0, PAGES))
    def allocate(self, count):
        free = PAGES - len(self.holders()) - len(self.kept)
        if count > free + len(self.kept):
            with pytest.raises(ValueError, match=f"{count} pages asked for, {free + len(self.kept)} of {PAGES}"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count and not set(pages) & set(self.holders())
        given_up = self.kept[: max(0, count - free)]
        assert set(given_up) <= set(pages) and not set(self.kept[len(given_up) :]) & set(pages)
        self.kept = self.kept[len(given_up) :]
        for page in given_up:
            del self.key_of[page]
        self.lists.append(pages)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def release(self, data):
        pages = self.lists.pop(data.draw(st.integers(0, len(self.lists) - 1)))
        self.pool.release(pages)
        held = self.holders()
        self.kept += [page for page in reversed(pages) if page not in held and page in self.key_of]

    @precondition(lambda self: any(self.lists))
    @rule(data=st.data(), key=st.integers(0, 5).map(lambda i: bytes([i])))
    def publish(self, data, key):
        page = data.draw(st.sampled_from(sorted(self.holders())))
        self.pool.publish(page, key)
        if page not in self.key_of and key not in self.key_of.values():
            self.key_of[page] = key

    @rule(keys=st.lists(st.integers(0, 6).map(lambda i: bytes([i])), max_size=4, unique=True))
    def share(self, keys):
        page_of = {key: page for page, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in page_of:
                break
            expected.append(page_of[key])
        matched = self.pool.match(keys)
        assert matched == expected
        assert self.pool.count_held(matched) == sum(page in self.holders() for page in matched)
        self.pool.hold(matched)
        self.kept = [page for page in self.kept if page not in matched]
        self.lists.append(matched)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def withdraw(self, data):
        pages = data.draw(st.sampled_from(self.lists))
        self.pool.withdraw(pages)
        for page in pages:
            self.key_of.pop(page, None)

    @rule()
    def forget(self):
        self.pool.forget_prefixes()
        self.key_of, self.kept = {}, []

    @invariant()
    def agrees(self):
        self.pool.check(self.lists)
        assert self.pool.available == PAGES - len(self.holders())
        assert self.pool.kept == len(self.kept)


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, pages: pool._free.append(pages[0]),
        lambda pool, pages: pool._free.pop(),
        lambda pool, pages: pool.hold(pages[:1]),
        lambda pool, pages: pool._kept.update({pool._free[0]: None}),
        lambda pool, pages: pool._keys.__setitem__(pages[1], b"other"),
        lambda pool, pages: pool._page_of.update({b"other": pages[1]}),
    ],
)
def test_the_check_notices_damage(damage):
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.publish(pages[0], b"key")
    pool.check([pages])
    damage(pool, pages)
    with pytest.raises(AssertionError):
        pool.check([pages])


def test_the_end_of_a_prefix_is_given_up_before_its_beginning():
    pool = PagePool(4)
    pages = pool.allocate(3)
    keys = [b"a", b"b", b"c"]
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    pool.allocate(2)
    assert pool.match(keys) == pages[:2]
    pool.allocate(1)
    assert pool.match(keys) == pages[:1]


def hasher(namespace=b"", size=4, secret=b"secret"):
    return PrefixHasher(size, 64, namespace, secret)


def keys_of(tokens, salt="", **options):
    made = hasher(**options)
    return made.extend(made.start(salt), np.asarray(tokens, np.int32), 0)[1]


TOKENS = st.lists(st.sampled_from([0, 1, 2, 500, 129_279]), max_size=40)


@given(tokens=TOKENS, cut=st.integers(0, 9))
def test_hashing_page_by_page_gives_the_keys_of_the_whole(tokens, cut):
    tokens = np.array(tokens, np.int32)
    made, cut = hasher(), min(4 * cut, len(tokens) // 4 * 4)
    state, first = made.extend(made.start("s"), tokens[:cut], 0)
    state, second = made.extend(state, tokens[cut:], cut)
    whole_state, whole = made.extend(made.start("s"), tokens, 0)
    assert first + second == whole and len(whole) == len(tokens) // 4
    assert np.array_equal(state, whole_state)


@given(tokens=TOKENS.filter(lambda t: len(t) >= 4), data=st.data())
def test_a_changed_token_changes_its_page_and_all_later_ones_only(tokens, data):
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = list(tokens)
    other[place] = data.draw(st.integers(0, 129_279).filter(lambda t: t != tokens[place]))
    before, after = keys_of(tokens), keys_of(other)
    page = place // 4
    assert before[:page] == after[:page]
    assert all(a != b for a, b in zip(before[page:], after[page:], strict=True))


@given(tokens=TOKENS)
def test_every_page_of_a_sequence_has_a_key_of_its_own(tokens):
    keys = keys_of(tokens)
    assert len(set(keys)) == len(keys)


def test_a_run_of_token_zero_does_not_look_like_its_own_beginning():
    assert len(set(keys_of([0] * 40))) == 10


def test_swapped_tokens_and_swapped_pages_have_other_keys():
    tokens = np.arange(16)
    assert keys_of(tokens)[-1] != keys_of(np.roll(tokens, 4))[-1]
    assert keys_of(tokens)[0] != keys_of([1, 0, *range(2, 16)])[0]


def test_salt_namespace_and_secret_separate():
    tokens = list(range(16))
    same = keys_of(tokens)
    assert same == keys_of(tokens)
    for other in (
        keys_of(tokens, salt="tenant"),
        keys_of(tokens, namespace=b"other model"),
        keys_of(tokens, secret=b"other process"),
    ):
        assert not set(same) & set(other)
    drawn = [PrefixHasher(4, 64) for _ in range(2)]
    first, second = (h.extend(h.start(""), np.arange(16, dtype=np.int32), 0)[1] for h in drawn)
    assert not set(first) & set(second)


def test_keys_of_many_similar_prefixes_do_not_collide():
    made = PrefixHasher(4, 8)
    tokens = np.zeros(8, np.int32)
    seen = set()
    for a in range(60):
        for b in range(60):
            tokens[3], tokens[4] = a, b << 11
            seen.add(made.extend(made.start(""), tokens, 0)[1][1])
    assert len(seen) == 3600
