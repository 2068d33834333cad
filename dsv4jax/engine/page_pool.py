"""Pages of one rank: who holds them, what prefix they contain, which is given up first.

A page is free, held by one or more requests, or kept: held by nobody but found by its key, until its space is needed.
Kept pages are given up in the order in which they were released, the last page of a prefix before the ones it follows.
"""

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt64

PageKey = bytes
"""Names a page's content: every token from the start of the sequence to the end of the page, and the salt."""


class PrefixHasher:
    """Keys of the pages of a token sequence, all at once: each key depends on every token before its page's end.

    Multilinear hashing: a key is two sums modulo 2^64, each of (token + 1) times a secret random 64-bit number of the
    token's position, on top of a start that the salt gives. Two different prefixes under one salt differ in some term
    by d != 0, |d| < 2^20 for ids below 2^20 (the + 1 makes this true for a prefix and its own continuation by zeros
    too), and d * random takes each value with probability at most 2^-45. So whatever the prefixes are, they share a
    key with probability at most 2^-90 over the choice of the secret, which never leaves the process. Different salts
    and namespaces differ by SHA-256. `namespace` names model, cache layout and tokenizer.
    """

    def __init__(self, page_size: int, max_tokens: int, namespace: bytes = b"", secret: bytes | None = None):
        secret = secrets.token_bytes(32) if secret is None else secret
        self._secret = hashlib.sha256(secret + hashlib.sha256(namespace).digest()).digest()
        self._page_size = page_size
        generator = np.random.Generator(np.random.Philox(int.from_bytes(self._secret[:16], "little")))
        self._factors = generator.integers(2**64, size=(2, max_tokens), dtype=np.uint64)

    def start(self, salt: str) -> UInt64[np.ndarray, "2"]:
        """The state before the first token."""
        return np.frombuffer(hashlib.sha256(self._secret + salt.encode()).digest()[:16], np.uint64)

    def extend(
        self, state: UInt64[np.ndarray, "2"], tokens: Int32[np.ndarray, " tokens"], first: int
    ) -> tuple[UInt64[np.ndarray, "2"], list[PageKey]]:
        """Keys of the full pages of `tokens`, which begin at position `first`, a page's start; and the state after."""
        size = self._page_size
        pages = len(tokens) // size
        factors = self._factors[:, first : first + pages * size].reshape(2, pages, size)
        values = tokens[: pages * size].astype(np.uint64).reshape(pages, size)
        values += np.uint64(1)
        if pages == 1:  # of a choice that decodes
            state = state + factors[:, 0] @ values[0]
            return state, [state.tobytes()]
        sums = np.einsum("kps,ps->kp", factors, values)
        states = np.cumsum(np.concatenate([state[:, None], sums], 1), 1, dtype=np.uint64)
        keys = np.ascontiguousarray(states.T[1:]).view("V16")
        return states[:, -1], keys[:, 0].tolist()


class PagePool:
    """Allocation by reference count, with the pages of earlier requests kept for reuse as long as nobody needs them."""

    def __init__(self, pages: int):
        self.num_pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._holders = np.zeros(pages, np.int32)
        self._keys: list[PageKey | None] = [None] * pages
        self._page_of: dict[PageKey, int] = {}
        self._kept: dict[int, None] = {}  # in order of release

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Pages held by nobody whose prefix can be reused."""
        return len(self._kept)

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Pages that hold the longest known prefix. They are not held yet: `hold` before anything is allocated."""
        # `iter` with a second argument goes on until it comes: to the first key that is not known.
        return list(iter(map(self._page_of.get, keys).__next__, None))

    def count_held(self, pages: Sequence[int]) -> int:
        """How many of the pages a request holds."""
        return int(np.count_nonzero(self._holders[list(pages)]))

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            self._kept.pop(page, None)
        self._holders[pages] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages without content, each with one holder.

        Raises:
          ValueError: fewer than `count` are available; nothing is allocated then.
        """
        if count > self.available:
            raise ValueError(f"{count} pages asked for, {self.available} of {self.num_pages} are available")
        while len(self._free) < count:
            page = next(iter(self._kept))
            del self._kept[page]
            self._forget(page)
            self._free.append(page)
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._holders[pages] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each page of one sequence, given in the order of its tokens."""
        self._holders[pages] -= 1
        for page, holders in zip(reversed(pages), self._holders[pages][::-1].tolist(), strict=True):
            if not holders:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def publish(self, page: int, key: PageKey) -> None:
        """Lets `match` find a held page, completely written, by its content; of equal pages the first is found."""
        if self._keys[page] is None and key not in self._page_of:
            self._keys[page] = key
            self._page_of[key] = page

    def withdraw(self, pages: Sequence[int]) -> None:
        """Held pages that `match` finds no more."""
        for page in pages:
            self._forget(page)

    def forget_prefixes(self) -> None:
        """No page is found any more; kept ones become free."""
        self._page_of.clear()
        self._keys = [None] * self.num_pages
        self._free.extend(self._kept)
        self._kept.clear()

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless exactly these page lists are held and every other page is free or kept."""
        expected = np.zeros(self.num_pages, np.int32)
        for pages in held:
            np.add.at(expected, list(pages), 1)
        assert np.array_equal(expected, self._holders), "holders differ from the pages of running requests"
        idle = np.bincount(np.array([*self._free, *self._kept], np.int64), minlength=self.num_pages)
        assert idle.max(initial=0) <= 1, "a page is in two lists"
        assert np.array_equal(idle == 1, expected == 0), "a page is lost or free while held"
        assert not any(map(self._keys.__getitem__, self._free)), "a free page has a key"
        assert all(self._keys[page] == key for key, page in self._page_of.items()), "keys and pages differ"
        assert len(self._page_of) == self.num_pages - self._keys.count(None), "a page has a key that does not find it"

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._page_of[key]
            self._keys[page] = None
