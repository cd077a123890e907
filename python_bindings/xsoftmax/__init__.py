"""Output layers for very many classes. See README.md."""

from . import _library, optim
from .clip_grad import clip_grad_norm_
