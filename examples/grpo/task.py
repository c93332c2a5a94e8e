"""The task: read a value out of a long prompt.

A prompt is a shuffled list of statements and, as its last token, a question. A statement "key k holds value
v" is one token; every prompt has its own table of values, so nothing but the prompt tells the answer:

    [k2=v5] [k0=v1] [k2=v5] [k3=v7] [k1=v1] ... [k0=v1] [k3?]        answer: v7

A response ends with its first value, or after ``RESPONSE_TOKENS`` tokens. Tokens, by id: the values, one
question a key, one statement a (key, value) pair.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

KEYS, VALUES = 4, 8
_QUESTION = VALUES
_STATEMENT = _QUESTION + KEYS
VOCABULARY = _STATEMENT + KEYS * VALUES

#: Shortest and longest prompt, tokens; longest response, tokens.
PROMPT_TOKENS, RESPONSE_TOKENS = (512, 576), 4

#: Accuracy of the best answers that do not look at the prompt.
CHANCE = 1 / VALUES


@dataclass(frozen=True)
class Question:
    """One prompt and what it asks for.

    Attributes:
        prompt: [P] ids; the last one is the question.
        answer: id of the value that the prompt's statements give the key.
    """

    prompt: tuple[int, ...]
    answer: int


def make_question(draw: random.Random, prompt_tokens: tuple[int, int] | None = None) -> Question:
    """A new question; each key is stated about equally often, in random order.

    Args:
        draw: random state.
        prompt_tokens: shortest and longest prompt; ``PROMPT_TOKENS`` where it is None.
    """
    table = [draw.randrange(VALUES) for _ in range(KEYS)]
    keys = [i % KEYS for i in range(draw.randint(*(prompt_tokens or PROMPT_TOKENS)) - 1)]
    draw.shuffle(keys)
    asked = draw.randrange(KEYS)
    statements = (_STATEMENT + key * VALUES + table[key] for key in keys)
    return Question((*statements, _QUESTION + asked), table[asked])


def questions_of_step(
    seed: int, step: int | str, count: int, prompt_tokens: tuple[int, int] | None = None
) -> list[Question]:
    """The questions of one step: the same on every rank, new in every step."""
    draw = random.Random(f"questions {seed} {step}")
    return [make_question(draw, prompt_tokens) for _ in range(count)]


def shuffle_prompts(questions: Sequence[Question]) -> list[Question]:
    """The control: every question, and its answer, behind the statements of the next question's prompt.

    The answer cannot be found any more: who reads such a prompt well is right by chance only.
    """
    others = [*questions[1:], *questions[:1]]
    return [replace(q, prompt=(*other.prompt[:-1], q.prompt[-1])) for q, other in zip(questions, others)]


def has_answered(response: Sequence[int]) -> bool:
    """Whether the response has ended by itself, with a value."""
    return len(response) > 0 and response[-1] < VALUES


def is_over(response: Sequence[int], limit: int = RESPONSE_TOKENS) -> bool:
    """Whether the response has ended: with a value, or at its limit."""
    return len(response) == limit or has_answered(response)


def is_right(question: Question, response: Sequence[int]) -> bool:
    """Whether the response ended with the answer."""
    return response[-1] == question.answer


def reward(question: Question, response: Sequence[int]) -> float:
    """1 for the answer, 0.1 less for every token before it; 0 for any other response."""
    return 1 - 0.1 * (len(response) - 1) if is_right(question, response) else 0.0


@dataclass(frozen=True)
class Retrieval:
    """The task at a size of one's own: what ``team.py`` asks of a task.

    Attributes:
        prompt_tokens: shortest prompt; the longest has an eighth more.
        response_tokens: longest response.
    """

    prompt_tokens: int
    response_tokens: int = RESPONSE_TOKENS

    def questions(self, seed: int, step: int | str, count: int) -> list[Question]:
        """The questions of a step, the same on every rank; `step` may also be a word, for other questions."""
        longest = self.prompt_tokens + self.prompt_tokens // 8
        return questions_of_step(seed, step, count, (self.prompt_tokens, longest))

    def is_over(self, response: Sequence[int]) -> bool:
        """Whether sampling ends behind this response."""
        return is_over(response, self.response_tokens)

    def has_answered(self, response: Sequence[int]) -> bool:
        """Whether it ended by itself, not at its limit."""
        return has_answered(response)

    def reward(self, question: Question, response: Sequence[int]) -> float:
        """By rule: see the module's `reward`."""
        return reward(question, response)

    def gold(self, question: Question) -> tuple[int, ...]:
        """The best response, for supervised fine-tuning."""
        return (question.answer,)
