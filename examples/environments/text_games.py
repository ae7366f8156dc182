"""Text games with `reset` or `init`, and `step`, as gymnasium and skyrl-gym have them, as one tool.

unfreeze grpo --model MODEL --data games.jsonl --env examples/environments/text_games.py:TextGame

{"prompt": "Play.", "game": "my_games:Hangman", "seed": 7}
{"prompt": "Play.", "game": "FrozenLake-v1", "seed": 7, "is_slippery": false}

`game` is module:Class, or an id of gymnasium.make; further columns are its arguments. The reward is the sum
of all steps'. A game's observation is told as text.
"""

import importlib


class TextGame:
    def reset(self, game: str, prompt: object = None, seed: int | None = None, **arguments) -> str:
        module, _, name = game.partition(":")
        if name:
            self.game = getattr(importlib.import_module(module), name)(**arguments)
        else:
            import gymnasium

            self.game = gymnasium.make(game, **arguments)
        self.total, self.over = 0.0, False
        begun = self.game.reset(seed=seed) if hasattr(self.game, "reset") else self.game.init(prompt)
        return f" {begun[0]}"

    def act(self, action: str) -> str:
        """Take a step in the game.

        Args:
            action: the move, as the game's text names it
        """
        if self.over:
            return "the game is over"
        discrete = hasattr(getattr(self.game, "action_space", None), "n")
        result = self.game.step(int(action) if discrete else action)
        if isinstance(result, dict):  # skyrl-gym
            seen, reward, self.over = result["observations"], result["reward"], result["done"]
            seen = "\n".join(message["content"] for message in seen)
        else:  # gymnasium: observation, reward, terminated, truncated, info
            seen, reward, ended, cut, _ = result
            self.over = bool(ended or cut)
        self.total += float(reward)
        return f"{seen}{' The game is over.' if self.over else ''}"

    def get_reward(self) -> float:
        return self.total
