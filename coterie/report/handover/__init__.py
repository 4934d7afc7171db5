"""The hand-over pack of a run: what its guarantee means, and how to check it without Coterie."""
