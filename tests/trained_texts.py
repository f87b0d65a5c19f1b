"""Texts like those that the tiny trained models were trained on: code and documentation of this project."""

TEXTS = (
    "The target itself writes the replies, half of them greedily, half sampled: a drafter must predict what this "
    "target\nsays, not what is right. Every position of a reply can start a block. It sees the committed "
    "positions before\nits anchor and must say the next seven tokens at once. The loss compares each.",
    "    def depth(self) -> int:\n"
    '        """Return the fixed depth."""\n'
    "        return self.count\n\n"
    "    def update(self, drafted: int, accepted: int) -> None:\n"
    '        """Learn nothing."""\n\n'
    "    @property\n"
    "    def reason(self) -> str:\n",
    "A drafter is made for one target. mlx_spec compares hidden size, vocabulary and every tensor's name and\n"
    "shape at load, and names what does not fit. Memory is taken as it is used, in pages of 32 positions.",
)
