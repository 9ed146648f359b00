"""What is sampled, while it is: groups (a prompt and its completions), drafts (completions in the making), chunks.

    Group   pages of the prompt, one reference each, while it is in the cache
    Draft   waits -> runs -> ends, or gives its pages back, with its tokens kept, and waits again
    Chunk   some tokens of a prompt, or of a draft that comes back, to be run in one prefill

Plain integers, no torch. The scheduler writes them, the runner reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qerl.engine.kv_cache import PAGE_SIZE, num_pages
from qerl.types import Completion, Request


def pages_alone(prompt_length: int, max_new_tokens: int) -> int:
    """Pages without which a request cannot end: a completion of full length, and the last, partly filled prompt page
    that each completion of a group copies."""
    return num_pages(prompt_length + max_new_tokens) + (prompt_length % PAGE_SIZE > 0)


@dataclass(eq=False)
class Group:
    """A request, with the pages of its prompt."""

    index: int
    """The request's place in the call of `generate`."""
    request: Request
    pages: list[int] = field(default_factory=list)
    """Of the prompt; none while it is not in the cache."""
    num_written: int = 0
    """Prompt tokens whose keys and values are there."""
    num_running: int = 0
    num_fresh: int = field(init=False)
    """Completions that have never run: their first token is drawn from the prompt's logits."""
    num_left: int = field(init=False)
    """Completions that have not ended."""

    def __post_init__(self) -> None:
        self.num_fresh = self.num_left = len(self.request.seeds)

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return self.request.prompt_ids

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def full_pages(self) -> int:
        """Prompt pages that all completions share; a last, partly filled one is copied."""
        return self.prompt_length // PAGE_SIZE


@dataclass(eq=False)
class Draft:
    """A completion in the making."""

    group: Group
    sample: int
    """Its place among the group's completions."""
    count: int = 0
    """Tokens drawn."""
    drawn: Completion | None = None
    """Those tokens, once it has given its pages back; its finish_reason says nothing yet."""
    pages: list[int] = field(default_factory=list)
    """In the order of its tokens, those shared with the prompt first; none while it waits."""
    num_written: int = 0
    """While it is prefilled: tokens of prompt and completion whose keys and values are in its pages."""
    num_mapped: int = 0
    """Pages that the runner knows."""
    line: int = -1
    """The runner's, for its text; -1 while it waits."""

    @property
    def age(self) -> tuple[int, int]:
        """Less is older."""
        return self.group.index, self.sample

    @property
    def seed(self) -> int:
        """The completion's key."""
        return self.group.request.seeds[self.sample]

    @property
    def limit(self) -> int:
        """Tokens that it can have."""
        return self.group.request.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion, while it waits."""
        return self.group.tokens + self.drawn.token_ids if self.drawn else self.group.tokens

    def missing_pages(self, num_new: int) -> int:
        """Pages that it lacks to draw so many more tokens, or as many as it can; those that it shares do not count."""
        wanted = num_pages(self.group.prompt_length + min(self.count + num_new, self.limit))
        return max(0, wanted - (len(self.pages) or self.group.full_pages))


@dataclass(frozen=True)
class Chunk:
    """Tokens from `start` on of a sequence whose earlier ones are in its pages: to be run, and written there."""

    group: Group
    sample: int | None
    """Whose tokens follow the prompt's; None: there are none but the prompt's."""
    start: int
    tokens: list[int]
    pages: list[int]
    needs_logits: bool
    """Whether first tokens are drawn from the logits after it."""

    @property
    def stop(self) -> int:
        """Place of the first token after it."""
        return self.start + len(self.tokens)
