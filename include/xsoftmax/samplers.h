#pragma once

// Samplers: modules that propose which classes to score for a query, and say how often each would be proposed. The same as
// xsoftmax.samplers in Python: same laws, same draws from the same generator state, same names of state.
//
//     xsoftmax::samplers::UnigramSampler sampler(counts, 512);
//     auto sets = sampler->sample(queries, target);
//
// Bad arguments throw c10::ValueError, c10::TypeError or c10::IndexError.

#include <xsoftmax/adaptive_samplers.h>
#include <xsoftmax/complement_sampler.h>
#include <xsoftmax/sampler.h>
#include <xsoftmax/static_samplers.h>
#include <xsoftmax/streaming_counts.h>
#include <xsoftmax/union_sampler.h>
