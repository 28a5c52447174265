"""Parser for the code blocks of Markdown pages, and their requirements."""

import re
from dataclasses import dataclass
from pathlib import Path

# A block is a fence with a language. A comment right before it has options, and code that runs first:
#
#   <!-- run ranks=2 needs=torch,pyarrow
#   model = torch.nn.Linear(2, 1)
#   -->
#
# A comment right after it that begins with `check` has code that runs last. With the option `continues`, a block
# runs after the previous blocks, in one program.
_BLOCK = re.compile(
    r"(?:^<!-- run(?P<options>[^\n]*?)(?:-->|\n(?P<before>.*?)\n?-->)\n+)?"
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n+^<!-- check\n(?P<after>.*?)\n?-->$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A program: one block, or several that continue each other."""

    page: str
    line: int
    language: str
    ranks: int
    needs: tuple[str, ...]
    program: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_code_blocks(page: Path, name: str) -> list[CodeBlock]:
    """Return the programs of `page`, in order; errors call the page `name`."""
    text = page.read_text(encoding="utf-8")
    blocks: list[CodeBlock] = []
    for match in _BLOCK.finditer(text):
        words = (match["options"] or "").split()
        options = dict(word.partition("=")[::2] for word in words)
        unknown = options.keys() - {"ranks", "needs", "continues"}
        if unknown:
            raise ValueError(f"{name}: unknown words {sorted(unknown)} in a comment about a code block")
        program = "".join(f"{part.rstrip()}\n" for part in (match["before"], match["code"], match["after"]) if part)
        line = text.count("\n", 0, match.start("code")) + 1
        if "continues" in options:
            last = blocks.pop()
            block = CodeBlock(name, last.line, last.language, last.ranks, last.needs, last.program + program)
        else:
            needs = tuple(filter(None, options.get("needs", "").split(",")))
            block = CodeBlock(name, line, match["language"], int(options.get("ranks", "1")), needs, program)
        blocks.append(block)
    return blocks
