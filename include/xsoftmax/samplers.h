#pragma once

// Samplers: modules that propose candidate classes for a query and report the expected count of
// each. They equal xsoftmax.samplers in Python: the same distributions, the same draws from the
// same generator state, the same state names.
//
//     xsoftmax::samplers::UnigramSampler sampler(counts, 512);
//     auto sets = sampler->sample(queries, target);
//
// Invalid arguments throw c10::ValueError, c10::TypeError or c10::IndexError.

#include <xsoftmax/adaptive_samplers.h>
#include <xsoftmax/sampler.h>
#include <xsoftmax/static_samplers.h>
