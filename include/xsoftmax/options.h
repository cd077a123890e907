#pragma once

// Options of losses, samplers and id tables, with their defaults.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

// Options of losses. Operators take them as text, `options`: "estimator=ranking,reduction=sum". A
// field that the text does not name keeps its default.

namespace xsoftmax {

/// Options of an estimator, which turns the scores of the target and the candidates into a loss.
struct EstimatorOptions {
  std::string estimator = "sampled_softmax"; ///< see xsoftmax::candidate_loss
  /// whether to drop candidates that equal the target, if the estimator allows it
  bool remove_accidental_hits = true;
  double label_smoothing = 0.0; ///< in [0, 1]

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("estimator", estimator);
    visitor("remove_accidental_hits", remove_accidental_hits);
    visitor("label_smoothing", label_smoothing);
  }
  bool operator==(const EstimatorOptions&) const = default;
};

/// Options of tower_loss.
struct TowerOptions : EstimatorOptions {
  std::string reduction = "mean"; ///< "mean" (weighted), "sum" or "none"

  template <typename Visitor>
  void visit(Visitor& visitor) {
    EstimatorOptions::visit(visitor);
    visitor("reduction", reduction);
  }
  bool operator==(const TowerOptions&) const = default;
};

/// Options of a loss over two towers. See xsoftmax.TwoTowerLoss in Python.
struct TwoTowerOptions {
  /// ids are in [0, num_items); nullopt: any int64 is an id
  std::optional<int64_t> num_items = std::nullopt;
  std::string estimator = "sampled_softmax"; ///< a built-in estimator that does not need noise
  double temperature = 1.0; ///< above 0; divides the similarities
  std::string similarity = "dot"; ///< "dot" or "cosine"
  /// whether to drop candidates that equal the query's item, if the estimator allows it
  bool remove_accidental_hits = true;
  int64_t memory = 0; ///< number of items from past batches that are also candidates
  /// width of the vectors in memory, required if memory > 0
  std::optional<int64_t> dim = std::nullopt;
  int64_t memory_warmup = 0; ///< number of calls before memory contributes candidates
  std::string reduction = "mean"; ///< "mean" (weighted), "sum" or "none"

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_items", num_items);
    v("estimator", estimator);
    v("temperature", temperature);
    v("similarity", similarity);
    v("remove_accidental_hits", remove_accidental_hits);
    v("memory", memory);
    v("dim", dim);
    v("memory_warmup", memory_warmup);
    v("reduction", reduction);
  }
  bool operator==(const TwoTowerOptions&) const = default;
};

/// How the losses of queries are reduced, as in torch.nn.CrossEntropyLoss.
struct ReductionOptions {
  /// "mean" (weighted, over targets that are not ignored), "sum" or "none"
  std::string reduction = "mean";
  int64_t ignore_index = -100; ///< targets with this value have no loss and no gradient

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("reduction", reduction);
    visitor("ignore_index", ignore_index);
  }
  bool operator==(const ReductionOptions&) const = default;
};

/// How scores s, the products of queries and rows plus the bias, become the logits of the softmax:
///
///     softcap * tanh(logit_scale * s / softcap), or logit_scale * s without a cap
struct LogitOptions {
  double logit_scale = 1.0; ///< above 0
  double softcap = 0.0; ///< above 0: logits lie in (-softcap, softcap); 0: no cap

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("logit_scale", logit_scale);
    visitor("softcap", softcap);
  }
  bool operator==(const LogitOptions&) const = default;
};

/// Options of linear_cross_entropy.
struct CrossEntropyOptions : ReductionOptions, LogitOptions {
  double label_smoothing = 0.0; ///< in [0, 1]
  double z_loss = 0.0; ///< at least 0; adds z_loss * (log normaliser)^2 to the loss of each query
  /// at least 1; MB on CUDA for the logits that exist at once, their gradients, and the float32
  /// gradients of table and input, which do not count if they take more than half of it
  int64_t workspace_mb = 512;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    ReductionOptions::visit(visitor);
    LogitOptions::visit(visitor);
    visitor("label_smoothing", label_smoothing);
    visitor("z_loss", z_loss);
    visitor("workspace_mb", workspace_mb);
  }
  bool operator==(const CrossEntropyOptions&) const = default;
};

/// How the losses of multiple positives are reduced, for target [*, T].
struct PositivesOptions {
  /// - "mean": the mean of the positives' losses, each computed with the other positives removed
  ///   from the candidates.
  /// - "sum": the negative log of the positives' summed probability.
  std::string positives = "mean";

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("positives", positives);
  }
  bool operator==(const PositivesOptions&) const = default;
};

/// Options of linear_positives_loss. label_smoothing must be 0.
struct ExactPositivesOptions : CrossEntropyOptions, PositivesOptions {
  template <typename Visitor>
  void visit(Visitor& visitor) {
    CrossEntropyOptions::visit(visitor);
    PositivesOptions::visit(visitor);
  }
  bool operator==(const ExactPositivesOptions&) const = default;
};

/// Options of sampled_softmax_loss.
struct SampledSoftmaxOptions : EstimatorOptions, ReductionOptions, PositivesOptions, LogitOptions {
  /// true: the table's gradient is row-sparse, with a static number of rows R. false: it is dense.
  /// nullopt: row-sparse if R is at most N, the number of rows of the table.
  std::optional<bool> sparse_grad = std::nullopt;
  /// at least 0; adds z_loss * (estimated log normaliser)^2 to the loss of each query
  double z_loss = 0.0;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    EstimatorOptions::visit(visitor);
    ReductionOptions::visit(visitor);
    PositivesOptions::visit(visitor);
    LogitOptions::visit(visitor);
    visitor("sparse_grad", sparse_grad);
    visitor("z_loss", z_loss);
  }
  bool operator==(const SampledSoftmaxOptions&) const = default;
};

} // namespace xsoftmax

// Options of the samplers that follow the class table. C++ constructors take the structs; operators
// parse them from text.

namespace xsoftmax::samplers {

/// Options of MidxSampler and its variants; see xsoftmax.samplers.MidxSampler.
struct MidxOptions {
  int64_t num_samples = 20; ///< M: draws per query, or for the batch if shared
  int64_t codewords = 64; ///< K, in [1, 1024]
  std::string kind = "rq"; ///< "rq": residual quantizer; "pq": product quantizer
  bool bias = false; ///< whether the class table has a bias
  /// whether the batch shares one set, drawn from the mixture of the queries' q
  bool shared = false;
  /// Whether to sample without replacement, so that no class appears twice in a set. nullopt: true
  /// for shared sets, false for private ones.
  std::optional<bool> distinct = std::nullopt;
  /// mixture of the queries' q for shared sets: "mean" or "rms" (root mean square)
  std::string mixture = "mean";
  int64_t refresh_every = 500; ///< steps between refreshes; 0: only at step 0
  int64_t update_every = 0; ///< steps between updates; 0: never
  int64_t iterations = 10; ///< iterations of K-means per codebook
  /// number of rows that K-means uses; nullopt: 256 per codeword
  std::optional<int64_t> train_points = std::nullopt;
  std::string form = "plain"; ///< set by the class: "plain", "exact", "spread" or "learnable"
  /// Number of slots. If set, classes are identified by slot number and the index has no table of
  /// classes.
  std::optional<int64_t> slots = std::nullopt;
  at::Tensor exclude = {}; ///< int64 [K], classes that are never drawn; not part of the text

  bool is_distinct() const { return distinct.value_or(shared); }
  /// Whether the classes of a cell have different weights.
  bool weighted() const { return bias || form == "spread"; }

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

/// Options of LshSampler; see xsoftmax.samplers.LshSampler.
struct LshOptions {
  int64_t num_samples = 20; ///< M: draws per query
  int64_t tables = 16; ///< T: number of hash tables
  int64_t bits = 4; ///< hyperplanes per table, in [1, 20]
  double uniform = 0.1; ///< share of draws that are uniform over all classes, in [0, 1]
  bool bias = false; ///< whether the class table has a bias
  bool shared = false; ///< must be false, because a bucket belongs to one query
  int64_t refresh_every = 500; ///< steps between refreshes; 0: only at step 0
  at::Tensor exclude = {}; ///< int64 [K], classes that are never drawn; not part of the text

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

/// Options of SphereSampler and RffSampler; see these classes in xsoftmax.samplers.
struct KernelOptions {
  int64_t num_samples = 20; ///< M: draws per query
  double alpha = 100; ///< SphereSampler: q is proportional to alpha score^2 + 1
  int64_t features = 32; ///< RffSampler: R, number of random directions
  double tau = 4; ///< RffSampler: inverse variance of the kernel
  double floor = 0.01; ///< RffSampler: lower bound of the kernel of a class
  bool bias = false; ///< whether the class table has a bias
  bool shared = false; ///< must be false, because the kernel depends on the query
  int64_t refresh_every = 500; ///< steps between refreshes; 0: only at step 0
  std::string kernel = "sphere"; ///< set by the class: "sphere" or "rff"
  at::Tensor exclude = {}; ///< int64 [K], classes that are never drawn; not part of the text

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

// Options of streamed counts and the samplers that follow them. C++ constructors take the structs;
// operators parse them from text.

namespace xsoftmax::samplers {

/// Options of StreamingCounts; see xsoftmax.samplers.StreamingCounts.
struct StreamingOptions {
  /// N: ids are dense, in [0, N); nullopt: open ids, any int64
  std::optional<int64_t> num_ids = std::nullopt;
  /// number of seen ids after which a count halves; nullopt: no decay
  std::optional<double> half_life = std::nullopt;
  /// open ids: weight of a new gap, in (0, 1], replaces half_life
  std::optional<double> alpha = std::nullopt;
  int64_t buckets = 1 << 20; ///< open ids: buckets per hash function
  int64_t hashes = 2; ///< open ids: number of hash functions, at most 64

  bool open() const { return !num_ids.has_value(); }
  /// Whether counts are integers.
  bool exact() const { return !open() && !half_life.has_value(); }

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_ids", num_ids);
    v("half_life", half_life);
    v("alpha", alpha);
    v("buckets", buckets);
    v("hashes", hashes);
  }
};

/// Options of a UnigramSampler that follows streamed counts. With n the number of classes that are
/// not excluded,
///
///     q_i = (1 - uniform_share) counts_i^power / sum_j counts_j^power + uniform_share / n
struct FollowOptions {
  double power = 0.75; ///< finite and at least 0
  double uniform_share = 0.01; ///< in (0, 1]
  int64_t refresh_every = 1000; ///< steps between rebuilds of the tables; 0: only at step 0
  bool distinct = true; ///< set by the class: whether it draws without replacement

  template <typename Visitor>
  void visit(Visitor& v) {
    v("power", power);
    v("uniform_share", uniform_share);
    v("refresh_every", refresh_every);
    v("distinct", distinct);
  }
};

} // namespace xsoftmax::samplers

namespace xsoftmax {

/// Options of xsoftmax::nn::IdTable, and of xsoftmax.IdTable in Python.
struct IdTableOptions {
  /// Which id a full table evicts: "lfu", the least frequently seen; "lru", the one not seen for
  /// longest; nullopt: none.
  std::optional<std::string> eviction = "lfu";
  int64_t admission = 1; ///< sightings before an id gets a row, in [1, 1,000,000]

  template <typename Visitor>
  void visit(Visitor& v) {
    v("eviction", eviction);
    v("admission", admission);
  }
};

} // namespace xsoftmax
