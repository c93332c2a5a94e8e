"""The retrieval task as text, for a pretrained model and its tokenizer.

    {"river": 57, "green": 13, "table": 88}
    The value of "green" is "green":                      answer: " 13,"
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_augtree.data.tokenizer import Tokenizer

_WORDS = (
    "apple river stone cloud tiger lemon piano chair green bread ocean table horse grape plant music "
    "light paper metal glass north south white black cheese button window garden summer winter engine island"
).split()


@dataclass(frozen=True)
class TextQuestion:
    """One prompt and the number that it asks for.

    Attributes:
        prompt: [P] ids.
        answer: the number.
    """

    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class TextRetrieval:
    """What ``team.py`` asks of a task.

    Attributes:
        tokenizer: of the model.
        prompt_tokens: shortest prompt, as long as there are keys (about 9,000 tokens).
        response_tokens: longest response.
    """

    tokenizer: Tokenizer
    prompt_tokens: int
    response_tokens: int

    def questions(self, seed: int, step: int | str, count: int) -> list[TextQuestion]:
        """The questions of a step, the same on every rank."""
        draw = random.Random(f"text {seed} {step}")
        return [self._question(draw) for _ in range(count)]

    def _question(self, draw: random.Random) -> TextQuestion:
        pairs = [f"{first} {second}" for first in _WORDS for second in _WORDS]
        # Short prompts have keys that nothing else looks like; long ones have to go on with pairs.
        keys = [*draw.sample(_WORDS, len(_WORDS)), *draw.sample(pairs, len(pairs))]
        facts: dict[str, int] = {}
        tokens = 0
        while tokens < self.prompt_tokens and len(facts) < len(keys):
            key = keys[len(facts)]
            facts[key] = draw.randrange(10, 100)
            tokens += len(self.tokenizer.encode(f' "{key}": {facts[key]},'))
        asked = draw.choice(list(facts))
        text = json.dumps(facts) + f'\nThe value of "{asked}" is "{asked}":'
        return TextQuestion(tuple(self.tokenizer.encode(text)), facts[asked])

    def has_answered(self, response: Sequence[int]) -> bool:
        """Whether it ended by itself: with a mark, a new line, or the end of the text."""
        if len(response) > 0 and response[-1] == self.tokenizer.end_of_text:
            return True
        return bool(re.search(r"[.,}\n]", self.tokenizer.decode(response)))

    def is_over(self, response: Sequence[int]) -> bool:
        """Whether sampling ends behind this response."""
        return len(response) == self.response_tokens or self.has_answered(response)

    def reward(self, question: TextQuestion, response: Sequence[int]) -> float:
        """1 where the response begins with the number, and no digit follows; otherwise 0."""
        text = self.tokenizer.decode(response)
        return float(re.match(rf"\s*{question.answer}(?!\d)", text) is not None)

    def gold(self, question: TextQuestion) -> tuple[int, ...]:
        """The best response, for supervised fine-tuning."""
        return tuple(self.tokenizer.encode(f" {question.answer},"))
