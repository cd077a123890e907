#pragma once

#include "core/cpu_dispatch.h"
#include "scores/score_transform.h"

#include <cstdint>

namespace xsoftmax {

// What the score of a child makes of its parent's (Yu et al., 2022, section 2.3).

/// LogAdd: of logs, the log of the sum.
enum class ScoreCombiner : int { Multiply = 0, Add = 1, Last = 2, LogAdd = 3 };

struct ScoreRowTable {
  /// z[i] = combiner(parent, transform(z[i])).
  void (*combine)(float* z, int64_t n, float parent, ScoreTransform transform, int power, ScoreCombiner combiner);
};

XS_DECLARE_ISA_TABLE(ScoreRowTable, score_rows)

} // namespace xsoftmax
