#pragma once

#include "core/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

// What the score z of a child becomes, and what it makes of its parent's (PECOS paper, section 2.3).

enum class ScoreTransform : int { Identity = 0, Sigmoid = 1, Hinge = 2, LogSigmoid = 3, LogHinge = 4 };
enum class ScoreCombiner : int { Multiply = 0, Add = 1, Last = 2 };

struct ScoreRowTable {
  /// z[i] = combiner(parent, transform(z[i])). Sigmoid: 1 / (1 + e^-z). Hinge: e^-max(0, 1 - z)^power. Log...: their logs.
  void (*combine)(float* z, int64_t n, float parent, ScoreTransform transform, int power, ScoreCombiner combiner);
};

XS_DECLARE_ISA_TABLE(ScoreRowTable, score_rows)

} // namespace xsoftmax
