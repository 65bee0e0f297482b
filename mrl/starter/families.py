"""The table of task families: what may be asked of the starter policy, in words and in Python.

A family is a function from a random generator to a `Draft`: one small function to write, said in English and written as
a body. Nothing here knows about splits or test cases. Constants are small on purpose: they are copied from the prompt
digit by digit, which a model of under a million parameters can learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PARAMETERS = {"number": "n", "pair": "a, b", "text": "s", "list": "xs"}
"""Kind of input -> the parameter list of `f`. Every function of one kind is comparable by behaviour."""


@dataclass(frozen=True)
class Draft:
    """One function: `f(<parameters>)` returns <says>, written as `lines`."""

    kind: str
    says: str
    lines: tuple[str, ...]
    shape: str = ""
    """For the families of steps: the ordered names of the steps, e.g. "reverse>keep_first". Empty elsewhere."""

    @property
    def prompt(self) -> str:
        return f"Write a function f({PARAMETERS[self.kind]}) that returns {self.says}."

    @property
    def program(self) -> str:
        return f"def f({PARAMETERS[self.kind]}):\n" + "".join(f"    {line}\n" for line in self.lines)


@dataclass(frozen=True)
class Family:
    draw: Callable[[random.Random], Draft]
    share: float = 1.0
    """How often the supervised phase shows this family, relative to the others."""
    care: float = 0.5
    """Probability that a demonstration of this family is right (see `mistakes.py`)."""
    habit: str = ""
    """The mistake that the careless programmer makes most often in this family."""


COMPARISONS = {"greater than": ">", "less than": "<", "at least": ">=", "at most": "<="}
LETTERS = "abcdeilmnorst"
WORDS = ("ab", "ox", "end", "mr", "re", "un", "tion", "ed", "go", "is", "no", "ly", "est", "dr")


def constant(rng: random.Random, low: int = 2, high: int = 15) -> int:
    return rng.randint(low, high)


def returning(kind: str, says: str, expression: str) -> Draft:
    return Draft(kind, says, (f"return {expression}",))


def arithmetic(rng: random.Random) -> Draft:
    k, m = constant(rng), constant(rng)
    says, expression = rng.choice(
        [
            (f"{k} times a plus {m} times b", f"{k} * a + {m} * b"),
            (f"{k} times a minus {m} times b", f"{k} * a - {m} * b"),
            (f"the product of a and b, plus {k}", f"a * b + {k}"),
            (f"the product of a and b, minus {k}", f"a * b - {k}"),
            (f"the sum of a and b, times {k}", f"(a + b) * {k}"),
            (f"the difference a minus b, times {k}", f"(a - b) * {k}"),
            (f"the square of a plus {k} times b", f"a * a + {k} * b"),
            (f"the product of a plus {k} and b minus {m}", f"(a + {k}) * (b - {m})"),
        ]
    )
    return returning("pair", says, expression)


def division(rng: random.Random) -> Draft:
    k, m = constant(rng), constant(rng)
    says, expression = rng.choice(
        [
            (f"the remainder of n plus {k} divided by {m}", f"(n + {k}) % {m}"),
            (f"the remainder of {k} times n divided by {m}", f"{k} * n % {m}"),
            (f"the remainder of n divided by {k}, times {m}", f"n % {k} * {m}"),
            (f"the quotient of n plus {k} divided by {m}, rounded down", f"(n + {k}) // {m}"),
            (f"the quotient of n divided by {k}, rounded down, plus {m}", f"n // {k} + {m}"),
            (f"the quotient of n by {k} plus the remainder of n by {m}", f"n // {k} + n % {m}"),
        ]
    )
    return returning("number", says, expression)


def comparison(rng: random.Random) -> Draft:
    k, m = constant(rng), constant(rng)
    words, sign = rng.choice(list(COMPARISONS.items()))
    says, expression = rng.choice(
        [
            (f"a plus {k} is {words} b", f"a + {k} {sign} b"),
            (f"a minus {k} is {words} b", f"a - {k} {sign} b"),
            (f"{k} times a is {words} b", f"{k} * a {sign} b"),
            (f"a plus {k} is {words} {m} times b", f"a + {k} {sign} {m} * b"),
            (f"the sum of a and b is {words} {k}", f"a + b {sign} {k}"),
            (f"a is {words} {k} and b is {words} {m}", f"a {sign} {k} and b {sign} {m}"),
            (f"a is {words} {k} or b is {words} {m}", f"a {sign} {k} or b {sign} {m}"),
        ]
    )
    return returning("pair", f"whether {says}", expression)


def linear(rng: random.Random, name: str) -> tuple[str, str]:
    """A value made of one variable and one constant, in words and in code."""
    k = constant(rng)
    return rng.choice(
        [
            (f"{name} plus {k}", f"{name} + {k}"),
            (f"{name} minus {k}", f"{name} - {k}"),
            (f"{name} times {k}", f"{name} * {k}"),
            (f"{k} minus {name}", f"{k} - {name}"),
        ]
    )


def branches(rng: random.Random) -> Draft:
    words, sign = rng.choice(list(COMPARISONS.items()))
    k = constant(rng)
    (says_then, then), (says_else, otherwise) = linear(rng, "n"), linear(rng, "n")
    lines = (f"if n {sign} {k}:", f"    return {then}", f"return {otherwise}")
    return Draft("number", f"{says_then} if n is {words} {k}, otherwise {says_else}", lines)


def extremes(rng: random.Random) -> Draft:
    (says_a, a), (says_b, b) = linear(rng, "a"), linear(rng, "b")
    says, call = rng.choice([("the larger of", "max"), ("the smaller of", "min")])
    return returning("pair", f"{says} {says_a} and {says_b}", f"{call}({a}, {b})")


def strings(rng: random.Random) -> Draft:
    k = constant(rng, 2, 9)
    c, d = rng.sample(LETTERS, 2)
    word = rng.choice(WORDS)
    says, expression = rng.choice(
        [
            (f"the first {k} characters of s", f"s[:{k}]"),
            (f"the last {k} characters of s", f"s[-{k}:]"),
            (f"s without its first {k} characters", f"s[{k}:]"),
            (f"s without its last {k} characters", f"s[:-{k}]"),
            (f"s repeated {k} times", f"s * {k}"),
            (f"how often '{c}' occurs in s, plus {k}", f"s.count('{c}') + {k}"),
            (f"how often '{c}' occurs in s, times {k}", f"s.count('{c}') * {k}"),
            (f"s with every '{c}' replaced by '{d}'", f"s.replace('{c}', '{d}')"),
            (f"s with '{word}' added at the end", f"s + '{word}'"),
            (f"s with '{word}' added in front", f"'{word}' + s"),
            (f"the length of s, times {k}", f"len(s) * {k}"),
            (f"whether s contains '{c}'", f"'{c}' in s"),
        ]
    )
    return returning("text", says, expression)


def list_map(rng: random.Random) -> Draft:
    k, m = constant(rng), constant(rng)
    says, expression = rng.choice(
        [
            (f"each item of xs times {k} plus {m}", f"x * {k} + {m}"),
            (f"each item of xs times {k} minus {m}", f"x * {k} - {m}"),
            (f"{k} minus each item of xs", f"{k} - x"),
            (f"the square of each item of xs plus {k}", f"x * x + {k}"),
            (f"the remainder of each item of xs divided by {k}", f"x % {k}"),
            (f"the larger of {k} and each item of xs", f"max({k}, x)"),
            (f"the smaller of {k} and each item of xs", f"min({k}, x)"),
        ]
    )
    return returning("list", f"a list of {says}", f"[{expression} for x in xs]")


def condition(rng: random.Random) -> tuple[str, str]:
    """A condition on one list item, in words and in code."""
    k, width = constant(rng), constant(rng, 2, 12)
    words, sign = rng.choice(list(COMPARISONS.items()))
    return rng.choice(
        [
            (f"{words} {k}", f"x {sign} {k}"),
            (f"{words} {k}", f"x {sign} {k}"),
            (f"divisible by {k}", f"x % {k} == 0"),
            (f"not divisible by {k}", f"x % {k} != 0"),
            (f"from {k} to {k + width}", f"{k} <= x <= {k + width}"),
            (f"below {k} or above {k + width}", f"x < {k} or x > {k + width}"),
        ]
    )


def list_filter(rng: random.Random) -> Draft:
    says, test = condition(rng)
    return returning("list", f"the items of xs that are {says}", f"[x for x in xs if {test}]")


def list_fold(rng: random.Random) -> Draft:
    k = constant(rng)
    condition_says, test = condition(rng)
    says, expression = rng.choice(
        [
            (f"the number of items of xs that are {condition_says}", f"len([x for x in xs if {test}])"),
            (f"the sum of the items of xs that are {condition_says}", f"sum([x for x in xs if {test}])"),
            (f"whether all items of xs are {condition_says}", f"all([{test} for x in xs])"),
            (f"whether any item of xs is {condition_says}", f"any([{test} for x in xs])"),
            (f"the largest item of xs plus {k}", f"max(xs) + {k}"),
            (f"the smallest item of xs times {k}", f"min(xs) * {k}"),
            (f"the sum of the items of xs minus {k}", f"sum(xs) - {k}"),
        ]
    )
    return returning("list", says, expression)


def ranges(rng: random.Random) -> Draft:
    k, m = constant(rng), constant(rng)
    says, expression = rng.choice(
        [
            (f"a list of the numbers from {k} up to n", f"list(range({k}, n + 1))"),
            (f"a list of i times {k} plus {m} for each i below n", f"[i * {k} + {m} for i in range(n)]"),
            (f"a list of the multiples of {k} below n", f"list(range(0, n, {k}))"),
            (f"the sum of the numbers from {k} up to n", f"sum(range({k}, n + 1))"),
            (f"the sum of the multiples of {k} below n, plus {m}", f"sum(range(0, n, {k})) + {m}"),
            (f"the sum of i times {k} for each i below n", f"sum([i * {k} for i in range(n)])"),
            (f"how many numbers below n are divisible by {k}, times {m}", f"len(range(0, n, {k})) * {m}"),
        ]
    )
    return returning("number", says, expression)


def in_steps(kind: str, steps: list[tuple[str, str, str]]) -> Draft:
    """Each step is (name, words, expression of the parameter); all but the last one assign the parameter again."""
    name = PARAMETERS[kind]
    *first, last = [expression for _, _, expression in steps]
    lines = (*(f"{name} = {expression}" for expression in first), f"return {last}")
    says = f"{name} after these steps: " + ", then ".join(words for _, words, _ in steps)
    return Draft(kind, says, lines, shape=">".join(step for step, _, _ in steps))


def number_steps(rng: random.Random) -> Draft:
    def step() -> tuple[str, str, str]:
        k = constant(rng)
        return rng.choice(
            [
                ("add", f"add {k}", f"n + {k}"),
                ("subtract", f"subtract {k}", f"n - {k}"),
                ("multiply", f"multiply by {k}", f"n * {k}"),
                ("divide", f"divide by {k} rounding down", f"n // {k}"),
                ("remainder", f"take the remainder by {k}", f"n % {k}"),
                ("square", "square it", "n * n"),
            ]
        )

    return in_steps("number", [step() for _ in range(rng.choice([2, 2, 3]))])


def string_steps(rng: random.Random) -> Draft:
    def step() -> tuple[str, str, str]:
        k = constant(rng, 2, 6)
        c, d = rng.sample(LETTERS, 2)
        word = rng.choice(WORDS)
        return rng.choice(
            [
                ("reverse", "reverse it", "s[::-1]"),
                ("upper", "make it upper case", "s.upper()"),
                ("keep_first", f"keep the first {k} characters", f"s[:{k}]"),
                ("keep_last", f"keep the last {k} characters", f"s[-{k}:]"),
                ("drop_first", f"drop the first {k} characters", f"s[{k}:]"),
                ("drop_last", f"drop the last {k} characters", f"s[:-{k}]"),
                ("repeat", f"repeat it {k} times", f"s * {k}"),
                ("append", f"add '{word}' at the end", f"s + '{word}'"),
                ("replace", f"replace '{c}' by '{d}'", f"s.replace('{c}', '{d}')"),
            ]
        )

    return in_steps("text", [step(), step()])


def list_steps(rng: random.Random) -> Draft:
    def inner() -> list[tuple[str, str, str]]:
        k, short = constant(rng), constant(rng, 2, 5)
        words, sign = rng.choice(list(COMPARISONS.items()))
        return [
            ("keep", f"keep the items {words} {k}", f"[x for x in xs if x {sign} {k}]"),
            ("add", f"add {k} to each item", f"[x + {k} for x in xs]"),
            ("multiply", f"multiply each item by {k}", f"[x * {k} for x in xs]"),
            ("drop_first", f"drop the first {short} items", f"xs[{short}:]"),
            ("keep_first", f"keep the first {short} items", f"xs[:{short}]"),
            ("reverse", "reverse it", "xs[::-1]"),
            ("sort", "sort it", "sorted(xs)"),
        ]

    final = [("sum", "add all items up", "sum(xs)"), ("count", "count the items", "len(xs)")]
    return in_steps("list", [rng.choice(inner()), rng.choice(inner() + final)])


FAMILIES: dict[str, Family] = {
    "arithmetic": Family(arithmetic, care=0.4, habit="operator"),
    "division": Family(division, care=0.33, habit="operator"),
    "comparison": Family(comparison, care=0.3, habit="boundary"),
    "branches": Family(branches, care=0.3, habit="boundary"),
    "extremes": Family(extremes, care=0.35, habit="name"),
    # Copying letters takes many more demonstrations than copying digits.
    "strings": Family(strings, share=2.5, care=0.35, habit="off_by_one"),
    "list_map": Family(list_map, care=0.35, habit="drop"),
    "list_filter": Family(list_filter, care=0.3, habit="boundary"),
    "list_fold": Family(list_fold, care=0.3, habit="boundary"),
    "ranges": Family(ranges, share=0.5, care=0.25, habit="off_by_one"),
    "number_steps": Family(number_steps, share=1.2, care=0.3, habit="order"),
    "string_steps": Family(string_steps, share=2.0, care=0.3, habit="order"),
    "list_steps": Family(list_steps, share=0.7, care=0.3, habit="order"),
}
