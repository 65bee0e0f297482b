"""`textarena`: a game for one player of the library TextArena (https://github.com/LeonGuertler/TextArena)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from mrl.environments.base import playing, rows, seeded, setting
from mrl.errors import ConfigError, EnvError

_one_at_a_time = threading.Lock()


class TextGame:
    """A game by its name there, e.g. `Mastermind-v0`, `TowerOfHanoi-v0`, `Sudoku-v0-easy`, `Minesweeper-v0-small`."""

    def __init__(self, game: str = "Mastermind-v0") -> None:
        """game: of one player. Some (Wordle, Hangman) need word lists of `nltk`, which have to be there.

        Raises ConfigError without textarena.
        """
        if find_spec("textarena") is None:
            raise ConfigError("textarena: it is not installed: `pip install 'mrl[textarena]'`")
        self.default = game
        self.done = False
        self.game: Any = None
        self._name, self._random = "", _Randomness(0)

    def reset(self, seed: int | None = None, game: str | None = None, **columns: Any) -> str:
        """game: for this attempt. Raises ConfigError for a game there is not, EnvError for one that does not start."""
        name = setting(game, self.default)
        if self._name != name:
            self.game, self._name = _make(name), name
        self.done, self._random = False, _Randomness(seeded(seed, ""))
        with self._random.used():
            try:
                self.game.reset(num_players=1, seed=self._random.seed)
            except AssertionError as error:
                raise ConfigError(f"textarena: {name} is not a game for one player: {error}") from error
        return "\n" + self._said()

    def play(self, message: str) -> str:
        """
        Makes a move.

        Args:
            message: The move, in square brackets as the game describes it.
        """
        playing(self.done)
        with self._random.used():
            self.done, _ = self.game.step(message if "[" in message else f"[{message}]")
        said = self._said()
        return said + "\n" * bool(said) + self._outcome() if self.done else said

    def get_reward(self) -> float:
        """The game's: mostly 1 for a win, and a share for what was done by then. 0 while it lasts."""
        rewards = self.game.state.rewards if self.done else None
        return float(rewards[0]) if rewards else 0.0

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset."""
        return rows("Play a game with the tool `play`.", count, seed)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _said(self) -> str:
        """What the game said since it was asked last."""
        _, messages = self.game.get_observation()
        return "\n".join(str(text).strip() for sender, text, _ in messages if sender == -1)

    def _outcome(self) -> str:
        return str(self.game.state.game_info[0].get("reason", "The game is over."))


class _Randomness:
    """An attempt's own. The games draw from Python's and numpy's global generators, as others of the process do."""

    def __init__(self, seed: int) -> None:
        import numpy

        self.seed = seed
        self.states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            numpy.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """What is drawn meanwhile follows from the seed and from what was drawn here before. One attempt at a time."""
        import numpy

        with _one_at_a_time:
            others = (random.getstate(), numpy.random.get_state())
            self._set(self.states)
            try:
                yield
                self.states = (random.getstate(), numpy.random.get_state())
            finally:
                self._set(others)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        import numpy

        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _make(name: str) -> Any:
    """The game without what formats it for other callers."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        known = sorted(name for name in ENV_REGISTRY if not name.endswith(("-train", "-raw")))
        raise ConfigError(f"textarena: there is no game {name!r} (known: {', '.join(known)})")
    try:
        game = textarena.make(name)
    except (LookupError, ImportError, OSError) as error:
        raise EnvError(f"textarena: {name} needs something that is not here: {error}") from error
    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game
