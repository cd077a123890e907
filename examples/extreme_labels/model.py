"""Text encoders with outputs [Q, width]."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class BagOfWords(nn.Module):
    """The sum of feature embeddings weighted by tf-idf, followed by a residual layer.

    With begin_linear=True the residual layer starts at zero, so that the distance between two
    embeddings is initially about the distance between their tf-idf vectors.
    """
    def __init__(self, features: int, width: int, dropout: float, begin_linear: bool = False):
        super().__init__()
        self.embedding = nn.EmbeddingBag(features, width, mode="sum", sparse=True)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
                                    nn.Linear(width, width))
        if begin_linear:
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, columns: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        """Encodes the rows of a CSR matrix; offsets [Q] are the starts of its rows."""
        sums = self.embedding(columns, offsets, per_sample_weights=values)
        return self.norm(sums + self.layers(self.dropout(sums)))


class Transformer(nn.Module):
    """Word embeddings with positions, attention layers, and the mean over the words."""
    def __init__(self, vocabulary: int, width: int, dropout: float, layers: int = 2, heads: int = 4,
                 length: int = 64):
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary + 1, width, padding_idx=0, sparse=True)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True,
                                           norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(
            layer, layers, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Encodes word ids [Q, T], which start at 1 and are padded with 0 at the end."""
        missing = words == 0
        missing[:, 0] = False  # keep one position for a text without words
        hidden = self.layers(
            self.embedding(words) * self.place.shape[1]**0.5 + self.place[:words.shape[1]],
            src_key_padding_mask=missing)
        kept = (~missing).unsqueeze(2).to(hidden.dtype)
        return self.norm((hidden * kept).sum(1) / kept.sum(1))


class HuggingFace(nn.Module):
    """The mean of the last hidden states of an encoder of the transformers library.

    Args:
        name: a model of the Hugging Face Hub, or a folder that save() or save_pretrained() wrote.
            None: a small BERT that has yet to be trained, with a WordPiece tokenizer of `texts`.
        texts, width, dropout, layers, heads, vocabulary: of that BERT.
        length: the largest number of tokens of a text.
    """
    def __init__(self, name: str | None, texts: list[str], width: int, dropout: float, *,
                 layers: int = 4, heads: int = 4, vocabulary: int = 8192, length: int = 96):
        from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

        super().__init__()
        self.length = length
        if name is None:
            self.tokenizer: Any = train_tokenizer(texts, vocabulary)
            config = BertConfig(vocab_size=len(self.tokenizer), hidden_size=width,
                                num_hidden_layers=layers, num_attention_heads=heads,
                                intermediate_size=4 * width, hidden_dropout_prob=dropout,
                                attention_probs_dropout_prob=dropout,
                                max_position_embeddings=length)
            self.encoder: Any = BertModel(config, add_pooling_layer=False)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.encoder = AutoModel.from_pretrained(name)
        self.tokenizer.padding_side = "right"  # batches are cut there
        self.width = self.encoder.config.hidden_size

    def tokenize(self, texts: list[str]) -> Tensor:
        """Returns token ids [Q, T], padded at the end."""
        return self.tokenizer(texts, truncation=True, max_length=self.length, padding=True,
                              return_tensors="pt")["input_ids"]

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != self.tokenizer.pad_token_id
        hidden = self.encoder(input_ids=tokens, attention_mask=is_token.long()).last_hidden_state
        kept = is_token.unsqueeze(2).to(hidden.dtype)
        return (hidden * kept).sum(1) / kept.sum(1).clamp(min=1)

    def save(self, folder: Path) -> None:
        self.encoder.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Returns a WordPiece tokenizer with the tokens of BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {
        "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"
    }
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(vocab_size=vocabulary, show_progress=False,
                                  special_tokens=list(special.values())))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
