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


def guess_argument(name: str, argument_names: Iterable[str]) -> str:
    """Returns the argument that was probably meant by a misspelt name, or "" if there is none."""
    # Prefer class_weight, since `weight` is the class table where both exist.
    names = sorted(argument_names, key=lambda argument: argument != "class_weight")
    for argument in names:
        if name in _SYNONYMS.get(argument, ()):
            return argument
    close = difflib.get_close_matches(name, names, 1)
    return close[0] if close else ""


def _make_unknown_error(owner: str, kind: str, name: str, names: Iterable[str]) -> TypeError:
    guess = guess_argument(name, names)
    hint = f"did you mean {guess}?" if guess else f"it has {', '.join(names)}"
    return TypeError(f"{owner}: expected arguments of the {kind}, got {name}: {hint}")


def _check_call(owner: str, parameters: Dict[str, inspect.Parameter], args: Any,
                kwargs: Any) -> None:
    """Raises TypeError if a call of the constructor does not fit its signature."""
    kinds = [parameter.kind for parameter in parameters.values()]
    positional_names = [
        name for name, parameter in parameters.items()
        if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in parameters:
                raise _make_unknown_error(owner, "constructor", name, parameters)
    if len(args) > len(positional_names) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names = ", ".join(positional_names) or "none"
        raise TypeError(
            f"{owner}: expected at most {len(positional_names)} arguments without a name "
            f"({names}), got {len(args)}: pass the others by name")
    passed_names = {*positional_names[:len(args)], *kwargs}
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if is_required and name not in passed_names:
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
            _check_call(type(self).__name__, _parameters, args, kwargs)
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
        attribute = vars(owner)[name]
        is_static = isinstance(attribute, staticmethod)
        function = attribute.__func__ if is_static else attribute
        parameters = inspect.signature(function).parameters
        if inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in parameters.values()
                                             ] or hasattr(function, "__wrapped__"):
            continue
        call_name = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
        wrapper = _explain_function(
            call_name, function,
            [name_in_signature for name_in_signature in parameters if name_in_signature != "self"])
        setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)


def _explain_function(call_name: str, function: Callable[..., Any],
                      names: Sequence[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                raise _make_unknown_error(call_name, "function", name, names)
        return function(*args, **kwargs)

    return call
