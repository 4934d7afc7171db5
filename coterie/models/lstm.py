"""An explicit LSTM, because `nn.LSTM` supports neither per-example gradients in Opacus nor `vmap`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CharLSTM(nn.Module):
    """Map tokens (n, L), int64, to logits (n, vocabulary) of the next token: embedding, one LSTM layer, output layer.

    Args:
        vocabulary: number of tokens.
        embedding: dimension of the embedding.
        width: dimension of the hidden state.
    """

    def __init__(self, vocabulary: int, *, embedding: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.input = nn.Linear(embedding, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, L) to the logits (n, vocabulary) of the next one."""
        inputs = self.input(self.embedding(tokens))  # for all steps: (n, L, 4 width)
        state = cell = torch.zeros_like(inputs[:, 0, : self.width])
        for step in inputs.unbind(1):
            let_in, keep, new, let_out = (step + self.hidden(state)).chunk(4, dim=1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(new)
            state = torch.sigmoid(let_out) * torch.tanh(cell)
        logits: Tensor = self.output(state)
        return logits
