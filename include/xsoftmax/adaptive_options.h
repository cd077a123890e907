#pragma once

// Options of the samplers that follow the class table, with their defaults: what constructors in C++ take, and operators read from text.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace xsoftmax::samplers {

/// Of MidxSampler and its study forms; see xsoftmax.samplers.MidxSampler.
struct MidxOptions {
  int64_t num_samples = 20;                    ///< M: draws for each query, or for the batch
  int64_t codewords = 64;                      ///< K, in [1, 1024]
  std::string kind = "rq";                     ///< residual quantizer, or "pq", a product quantizer
  bool bias = false;                           ///< the class table has a bias
  bool shared = false;                         ///< one set for the batch, from the mixture of the queries' q
  std::optional<bool> distinct = std::nullopt; ///< no class twice in a set; none: shared sets are distinct, private ones independent
  std::string mixture = "mean";                ///< of the queries' q, for a shared set; or "rms", their root mean square
  int64_t refresh_every = 500;                 ///< steps; 0: only at step 0
  int64_t update_every = 0;                    ///< steps; 0: never
  int64_t iterations = 10;                     ///< of K-means, for each codebook
  std::optional<int64_t> train_points = std::nullopt; ///< rows that K-means sees; none: 256 a codeword
  std::string form = "plain";                  ///< which class it is: "exact", "spread", "learnable"; the class sets it
  std::optional<int64_t> slots = std::nullopt; ///< so many classes, numbered by their slots: the index has no table of classes
  at::Tensor exclude = {};                     ///< int64 [K]: classes that are never drawn; no part of the text

  bool is_distinct() const { return distinct.value_or(shared); }
  bool weighted() const { return bias || form == "spread"; } ///< whether classes of a cell weigh differently

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_samples", num_samples);
    v("codewords", codewords);
    v("kind", kind);
    v("bias", bias);
    v("shared", shared);
    v("distinct", distinct);
    v("mixture", mixture);
    v("refresh_every", refresh_every);
    v("update_every", update_every);
    v("iterations", iterations);
    v("train_points", train_points);
    v("form", form);
    v("slots", slots);
  }
};

/// Of LshSampler; see xsoftmax.samplers.LshSampler.
struct LshOptions {
  int64_t num_samples = 20;    ///< M: draws for each query
  int64_t tables = 16;         ///< T
  int64_t bits = 4;            ///< planes of a table, in [1, 20]
  double uniform = 0.1;        ///< share of draws from all classes alike, in [0, 1]
  bool bias = false;           ///< the class table has a bias
  bool shared = false;         ///< true is an error: a bucket is that of a query
  int64_t refresh_every = 500; ///< steps; 0: only at step 0
  at::Tensor exclude = {};     ///< int64 [K]: classes that are never drawn; no part of the text

  bool is_distinct() const { return false; }

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_samples", num_samples);
    v("tables", tables);
    v("bits", bits);
    v("uniform", uniform);
    v("bias", bias);
    v("shared", shared);
    v("refresh_every", refresh_every);
  }
};

/// Of SphereSampler and RffSampler; see those classes of xsoftmax.samplers.
struct KernelOptions {
  int64_t num_samples = 20;      ///< M: draws for each query
  double alpha = 100;            ///< sphere: q ~ alpha score^2 + 1
  int64_t features = 32;         ///< rff: R, random directions
  double tau = 4;                ///< rff: inverse variance of the kernel
  double floor = 0.01;           ///< rff: what the kernel of a class counts at least
  bool bias = false;             ///< the class table has a bias
  bool shared = false;           ///< true is an error: a kernel looks at the query
  int64_t refresh_every = 500;   ///< steps; 0: only at step 0
  std::string kernel = "sphere"; ///< or "rff"; the class sets it
  at::Tensor exclude = {};       ///< int64 [K]: classes that are never drawn; no part of the text

  bool is_distinct() const { return false; }
  bool sphere() const { return kernel == "sphere"; }
  double scale() const { return sphere() ? alpha : floor; }

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_samples", num_samples);
    v("alpha", alpha);
    v("features", features);
    v("tau", tau);
    v("floor", floor);
    v("bias", bias);
    v("shared", shared);
    v("refresh_every", refresh_every);
    v("kernel", kernel);
  }
};

} // namespace xsoftmax::samplers
