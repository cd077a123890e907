"""Helpful error messages for misspelt, missing or superfluous arguments."""

import difflib
import functools
import inspect
from typing import Any, Callable, Dict, Iterable, Sequence

# Names that other libraries, or other modules of this one, use for the same argument.
_SYNONYMS = {
    "num_samples": ("num_negatives", "num_neg", "num_sampled", "n_samples", "negatives", "samples",
                    "num_draws"),
    "in_features": ("dim", "embedding_dim", "hidden_size", "d_model", "in_dim", "input_dim",
                    "width", "input_size"),
    "dim": ("in_features", "embedding_dim", "hidden_size", "d_model", "input_dim"),
    "num_classes": ("n_classes", "out_features", "num_embeddings", "vocab_size", "num_labels",
                    "num_items", "n_items", "num_words"),
    "num_items": ("num_classes", "n_items", "num_embeddings"),
    "sampler": ("negative_sampler", "candidate_sampler", "sampling", "noise_sampler"),
    "noise_sampler": ("sampler", "noise"),
    "weight": ("weights", "class_weight", "class_weights"),
    "class_weight": ("weights", "class_weights"),
    "topk": ("k", "top_k", "num_labels"),
    "counts": ("weights", "frequencies", "frequency", "freqs"),
    "weights": ("counts", "frequencies", "probabilities"),
    "ignore_index": ("padding_idx", "pad_token_id", "ignore_id"),
    "label_smoothing": ("smoothing",),
    "sparse_grad": ("sparse",),
    "head_classes": ("head", "shortlist", "always_scored"),
    "num_candidates": ("num_samples", "candidates"),
    "num_noises": ("num_samples", "num_negatives", "noises"),
    "beam": ("beam_width", "beam_size"),
    "remove_accidental_hits": ("remove_hits", "accidental_hits"),
    "lr": ("learning_rate",),
}

# Hints for required arguments, by name.
_REQUIRED: Dict[str, Callable[[], str]] = {
    "tree": lambda: "a LabelTree, such as xs.LabelTree.balanced(num_classes)",
}


def describe_argument(name: str, describe: Callable[[], str]) -> None:
    """Registers a hint that errors show if a constructor call lacks this argument."""
    _REQUIRED[name] = describe


def meant_argument(name: str, known: Iterable[str]) -> str:
    """Returns the argument that was probably meant by a misspelt name, or "" if there is none."""
    # Prefer class_weight, since `weight` is the class table where both exist.
    names = sorted(known, key=lambda argument: argument != "class_weight")
    for argument in names:
        if name in _SYNONYMS.get(argument, ()):
            return argument
    close = difflib.get_close_matches(name, names, 1)
    return close[0] if close else ""


def _unknown(owner: str, what: str, name: str, known: Iterable[str]) -> TypeError:
    meant = meant_argument(name, known)
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(known)}"
    return TypeError(f"{owner}: expected arguments of the {what}, got {name}: {hint}")


def _check(owner: str, parameters: Dict[str, inspect.Parameter], args: Any, kwargs: Any) -> None:
    """Raises TypeError if a call of the constructor does not fit its signature."""
    kinds = [parameter.kind for parameter in parameters.values()]
    by_place = [
        name for name, parameter in parameters.items()
        if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in parameters:
                raise _unknown(owner, "constructor", name, parameters)
    if len(args) > len(by_place) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names = ", ".join(by_place) or "none"
        raise TypeError(f"{owner}: expected at most {len(by_place)} arguments without a name "
                        f"({names}), got {len(args)}: pass the others by name")
    passed = {*by_place[:len(args)], *kwargs}
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if needed and name not in passed:
            hint = f": give {_REQUIRED[name]()}" if name in _REQUIRED else ""
            raise TypeError(f"{owner}: expected argument {name}, got none{hint}")


def explain_constructors(classes: Iterable[Any]) -> None:
    """Wraps the constructors of classes so that errors name the argument that was meant or left
    out.

    Only the error changes: ``inspect.signature``, subclasses and TorchScript see the original
    constructors.
    """
    for cls in classes:
        original = vars(cls).get("__init__")
        if not inspect.isfunction(original) or hasattr(original, "__wrapped__"):
            continue
        parameters = dict(list(inspect.signature(original).parameters.items())[1:])

        def __init__(self: Any, *args: Any, _original: Any = original,
                     _parameters: Any = parameters, **kwargs: Any) -> None:
            _check(type(self).__name__, _parameters, args, kwargs)
            _original(self, *args, **kwargs)

        cls.__init__ = functools.wraps(original)(__init__)


def explain_functions(owner: Any, names: Iterable[str]) -> None:
    """Wraps functions of a module, or methods of a class, so that errors name the argument that a
    misspelt keyword probably means.

    Args:
        owner: the module or class whose functions are replaced.
        names: names of functions, methods and static methods. Functions with ``**options`` are left
            unchanged.
    """
    for name in names:
        found = vars(owner)[name]
        is_static = isinstance(found, staticmethod)
        function = found.__func__ if is_static else found
        parameters = inspect.signature(function).parameters
        if inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in parameters.values()
                                             ] or hasattr(function, "__wrapped__"):
            continue
        called = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
        explained = _explained(called, function, [known for known in parameters if known != "self"])
        setattr(owner, name, staticmethod(explained) if is_static else explained)


def _explained(called: str, function: Callable[..., Any],
               known: Sequence[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise _unknown(called, "function", name, known)
        return function(*args, **kwargs)

    return call
