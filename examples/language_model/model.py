"""Encoders that map word ids to hidden states, and a scripted module for C++ programs."""

import warnings
from typing import Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.common.attention import TransformerLayer


class EdgeEmbedding(nn.Module):
    """An embedding that shares the rows of a tree's edges: the edge above each word's leaf."""
    def __init__(self, weight: nn.Parameter, edges: Tensor, sparse: bool):
        """Takes `edges` [num_words], the row of each word."""
        super().__init__()
        self.weight = weight
        self.sparse = sparse
        self.register_buffer("edges", edges)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(self.edges[ids], self.weight, sparse=self.sparse)


class LSTMEncoder(nn.Module):
    """An LSTM: ids [B, T] and the state of the previous call (initially an empty list) -> hidden
    [B, T, width] and the new state."""

    context: int

    def __init__(self, num_words: int, width: int = 200, layers: int = 2, dropout: float = 0.5,
                 sparse: bool = True):
        super().__init__()
        self.context = 512  # number of words of a prompt that are read
        self.embedding = nn.Embedding(num_words, width, sparse=sparse)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0,
                            batch_first=True)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, state: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        if len(state) == 0:
            zeros = torch.zeros(self.lstm.num_layers, ids.shape[0], self.lstm.hidden_size,
                                dtype=self.lstm.weight_ih_l0.dtype, device=ids.device)
            state = [zeros, zeros]
        hidden, (h, c) = self.lstm(self.dropout(self.embedding(ids).to(state[0].dtype)),
                                   (state[0], state[1]))
        return self.dropout(hidden), [h, c]


class TransformerEncoder(nn.Module):
    """A Transformer with the signature of LSTMEncoder. It reads only the T words of the call: the
    state is always empty."""

    context: int

    def __init__(
        self,
        num_words: int,
        width: int = 200,
        layers: int = 2,
        dropout: float = 0.5,
        sparse: bool = True,
        context: int = 35,
        heads: int = 4,
    ):
        super().__init__()
        self.context = context
        self.scale = width**0.5
        self.embedding = nn.Embedding(num_words, width, sparse=sparse)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            [TransformerLayer(width, heads, dropout, 4 * width, nn.GELU) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        # Small rows suit a tied output layer. Multiplied by `scale`, they match the layers' outputs
        # in size.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, ids: Tensor, state: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        x = self.dropout(
            self.embedding(ids).to(self.position.dtype) * self.scale + self.position[:ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.norm(x), state


ENCODERS = {"lstm": LSTMEncoder, "transformer": TransformerEncoder}


class Completer(nn.Module):
    """A trained model with its vocabulary, for programs without Python. One file contains all that
    is needed to complete a prompt. The weights and their dtype do not change afterwards, because a
    search index is built from the output layer."""

    words: List[str]
    index: Dict[str, int]
    search_index: List[Tensor]

    def __init__(self, encoder: nn.Module, linear: nn.Linear, words: List[str], pretokenised: bool,
                 special: Tuple[str, str, str]):
        super().__init__()
        self.encoder = encoder
        self.linear = linear
        self.words = words
        self.index = {word: i for i, word in enumerate(words)}
        self.pretokenised = pretokenised
        unknown, end_of_line, number = special
        self.unknown = self.index[unknown]
        self.end_of_line = self.index[end_of_line]
        self.number = self.index.get(number, self.unknown)
        self.search_index = torch.ops.xsoftmax.midx_search_index(linear.weight.detach(),
                                                                 linear.bias.detach(), None, None,
                                                                 0, torch.tensor(0))

    def forward(self, ids: Tensor, k: int = 5) -> Tuple[Tensor, Tensor]:
        """Maps ids [T] to the log-probabilities [k] and ids [k] of the most likely next words."""
        return self.next_words(ids, k)

    def last_hidden(self, ids: Tensor) -> Tensor:
        if ids.dim() != 1 or ids.numel() == 0:
            raise ValueError("next_words: expected ids [T] with at least one word")
        hidden, _ = self.encoder(ids[-self.encoder.context:].unsqueeze(0),
                                 torch.jit.annotate(List[Tensor], []))
        return hidden[0, -1]

    @torch.jit.export
    def next_words(self, ids: Tensor, k: int = 5) -> Tuple[Tensor, Tensor]:
        log_prob = F.log_softmax(self.linear(self.last_hidden(ids)), dim=-1)
        return torch.topk(log_prob, min(k, len(self.words)))

    @torch.jit.export
    def complete(self, ids: Tensor, n: int, temperature: float = 0.8, k: int = 40) -> Tensor:
        """Returns the next n words. Each is drawn by torch's generator from the k most likely
        words except <unk>; with temperature 0 it is the most likely one. The likely words are found
        by a certified search, which need not score the others."""
        prompt = ids.numel()
        for _ in range(n):
            scores, likely = self.search(self.last_hidden(ids), min(k + 1, len(self.words)))
            scores = scores.masked_fill(likely == self.unknown, float("-inf"))
            scores, at = torch.topk(scores, min(k, scores.numel()))
            likely = likely[at]
            if temperature > 0.0:
                choice = torch.multinomial(torch.softmax(scores / temperature, dim=0), 1)
            else:
                choice = scores.argmax(dim=0, keepdim=True)
            ids = torch.cat([ids, likely[choice]])
        return ids[prompt:]

    def search(self, hidden: Tensor, k: int) -> Tuple[Tensor, Tensor]:
        """Returns the scores [k] and ids [k] of the best words."""
        weight = self.linear.weight
        if self.search_index[0].device != weight.device:
            self.search_index = [part.to(weight.device) for part in self.search_index]
        scores, likely, _, _ = torch.ops.xsoftmax.search_topk(hidden.unsqueeze(0), weight,
                                                              self.linear.bias, self.search_index,
                                                              k, "")
        return scores[0], likely[0]

    @torch.jit.export
    def encode(self, text: str) -> Tensor:
        """Returns ids for a text, tokenised as by data.tokenise: <eos> first, as at the start of a
        line, then the words, without an <eos> after the last line."""
        ids: List[int] = [self.end_of_line]
        for i, line in enumerate(text.split("\n")):
            if i > 0 and ids[-1] != self.end_of_line:
                ids.append(self.end_of_line)
            for token in line.split() if self.pretokenised else self.tokens(line):
                digits = not self.pretokenised and "0" <= token[0] <= "9"
                ids.append(self.number if digits else self.index.get(token, self.unknown))
        return torch.tensor(ids, dtype=torch.long)

    def tokens(self, line: str) -> List[str]:
        """Implements data.TOKENS without regular expressions, which TorchScript does not have; its
        strings are UTF-8 bytes."""
        tokens: List[str] = []
        start = 0
        previous = 0  # kind of the previous character: 0 space, 1 letter, 2 digit, 3 symbol
        for i in range(len(line)):
            code = ord(line[i])
            if code >= 128 or 65 <= code <= 90 or 97 <= code <= 122:
                kind = 1
            elif 48 <= code <= 57:
                kind = 2
            elif 33 <= code <= 126:
                kind = 3
            else:
                kind = 0
            if kind != previous or kind == 3:
                if previous != 0:
                    tokens.append(line[start:i])
                start = i
            previous = kind
        if previous != 0:
            tokens.append(line[start:])
        return tokens

    @torch.jit.export
    def decode(self, ids: Tensor) -> str:
        """Joins words with spaces, and turns <eos> into a newline except at the start."""
        text = ""
        numbers: List[int] = ids.tolist()
        for i in numbers:
            word = self.words[i]
            if i == self.end_of_line:
                text += "\n" if text != "" else ""
            else:
                text += word if text == "" or text[-1] == "\n" else " " + word
        return text


def script(completer: Completer) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        # Deprecated since torch 2.10, but the only format whose methods C++ can call.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(completer.eval())
