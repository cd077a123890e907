"""Methods that studies compare, as options of the examples' training programs."""

EXACT = ["--loss", "exact"]
PLAIN = ("--estimator", "sampled_softmax")
RANKING = ("--estimator", "ranking")
# cheap compared with an encoder; the proposal is closer to the softmax than with 64 and 500
MIDX = ("--codewords", "256", "--refresh-every", "100")

# The samplers that Chen et al. (2025) compare. midx has the residual quantiser, midx_pq the product
# quantiser.
PAPER_SAMPLERS = ("uniform", "unigram", "lsh", "sphere", "rff", "midx_pq", "midx")


def private(sampler: str, samples: int, *more: str) -> list[str]:
    """Returns the options of a sampler that draws for each query."""
    static = ("--private",) if sampler in ("uniform", "unigram") else ()
    return sampled(sampler, str(samples), 0, *static, *more)


def sampled(sampler: str, samples: str, head: int = 0, *more: str) -> list[str]:
    """Returns the options of a sampled softmax; `more` overrides the estimator of the paper."""
    options = [
        *(() if "--estimator" in more else PLAIN), *more, *(MIDX if "midx" in sampler else ())
    ]
    return [
        "--loss", "sampled", "--sampler", *sampler.split(), "--samples", *samples.split(), "--head",
        str(head), *options
    ]


def cane(source: str, candidates: int, *more: str) -> list[str]:
    """Returns the options of CANE; `more` overrides the default of one uniform noise."""
    return [
        "--loss", "cane", "--candidates-from", source, "--candidates",
        str(candidates), "--noises", "1", "--noise", "uniform", "--noise-reduction", "mean_of_logs",
        *more
    ]
