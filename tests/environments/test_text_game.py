"""Games of the real TextArena."""

from __future__ import annotations

import random
import re
import threading
from itertools import permutations

import pytest

from mrl.environments.text_game import TextGame
from mrl.errors import ConfigError, DataError

pytestmark = pytest.mark.openenv

HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]


def test_a_game_is_won() -> None:
    game = TextGame(game="TowerOfHanoi-v0")
    assert "Tower of Hanoi with 3 disks" in game.reset(seed=0)
    for move in HANOI:
        assert not game.done
        assert game.get_reward() == 0.0
        said = game.play(move)
    assert game.done
    assert "Congratulations" in said
    assert game.get_reward() == 1.0
    with pytest.raises(ValueError, match="over"):
        game.play("[A C]")
    game.reset(seed=0)
    assert not game.done


def test_a_move_without_brackets_is_one() -> None:
    game = TextGame(game="TowerOfHanoi-v0")
    game.reset(seed=0)
    assert "moved disk 1 from A to C" in game.play("A C")


def test_a_second_wrong_move_ends_it() -> None:
    game = TextGame(game="TowerOfHanoi-v0")
    game.reset(seed=0)
    assert "invalid move" in game.play("[B C]")
    assert not game.done
    assert "Invalid Move" in game.play("[B C]")
    assert (game.done, game.get_reward()) == (True, 0.0)


def feedback(secret: tuple[int, ...], guess: tuple[int, ...]) -> tuple[int, int]:
    black = sum(map(int.__eq__, secret, guess))
    return black, len(set(secret) & set(guess)) - black


def test_mastermind_is_won_by_reasoning() -> None:
    game = TextGame()
    game.reset(seed=5)
    left = list(permutations(range(1, 7), 4))
    while not game.done:
        guess = left[0]
        said = re.search(r"(\d) black peg\(s\), (\d) white", game.play(" ".join(map(str, guess))))
        if said:
            left = [secret for secret in left if feedback(secret, guess) == (int(said[1]), int(said[2]))]
    assert game.get_reward() == 1.0


def play(seed: int, name: str, moves: list[str]) -> list[str]:
    game = TextGame(game=name)
    return [game.reset(seed=seed), *(game.play(move) for move in moves if not game.done)]


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("Mastermind-v0", ["[1 2 3 4]", "[5 6 1 2]"]),
        ("Minesweeper-v0-small", ["[2 2]", "[0 0]", "[4 4]"]),
        ("Sudoku-v0-easy", []),
        ("GuessTheNumber-v0", ["[3]", "[17]"]),
    ],
)
def test_a_seed_is_one_game_whatever_else_happens(name: str, moves: list[str]) -> None:
    """Eight at once, in threads, and others that draw from Python's generator between the moves."""
    expected = {seed: play(seed, name, moves) for seed in range(4)}
    assert len({repr(game) for game in expected.values()}) > 1
    random.seed(1)
    before = random.getstate()
    played: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda k=k: played.update({k: play(k % 4, name, moves)}))  # type: ignore[misc]
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert played == {k: expected[k % 4] for k in range(8)}
    assert random.getstate() == before, "the process's own generator is as it was"


def test_games_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="no game 'Chess-v9'"):
        TextGame(game="Chess-v9").reset(seed=1)
    with pytest.raises(ConfigError, match="not a game for one player"):
        TextGame(game="TicTacToe-v0").reset(seed=1)
    with pytest.raises(DataError, match="seed"):
        TextGame().reset()


def test_a_task_names_its_game() -> None:
    game = TextGame()
    assert "Hanoi" in game.reset(seed=1, game="TowerOfHanoi-v0")
    assert "Mastermind" in game.reset(seed=1)
