#pragma once

// Class tables stored in files, for tables that do not fit into memory, and in memory of the host,
// for those that do not fit into the memory of a GPU.

#include <xsoftmax/options.h>
#include <xsoftmax/static_samplers.h>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax::tables {

/// Fills rows like torch::nn::Linear: uniform in [-1 / sqrt(D), 1 / sqrt(D)]. One-dimensional rows
/// use D = 1.
void as_linear(torch::Tensor rows);

struct MappedOptions {
  torch::Dtype dtype = torch::kFloat32;
  /// Fills rows [B, D] in place, like the functions of torch::nn::init. It is called for one block
  /// of rows after another, from the last to the first. Null: zeros, which take no time.
  std::function<void(torch::Tensor)> init = as_linear;
  /// Called with (rows initialised, total rows) between blocks; may throw to stop.
  std::function<void(int64_t, int64_t)> progress = nullptr;
};

/// Returns a parameter [num_rows, width], or [num_rows] without a width, whose memory is the file
/// `path`. Creates the file if it does not exist; an existing file must have this shape and dtype.
/// A file whose creation was interrupted because the process was killed is created again. See
/// xsoftmax.tables in Python, which uses the same files.
///
///     const auto weight = xsoftmax::tables::mapped("classes.safetensors", 120'000'000, 64,
///         {.init = [](torch::Tensor rows) { torch::nn::init::normal_(rows, 0, .02); }});
///     xsoftmax::nn::SampledSoftmaxLoss loss(64, 120'000'000, sampler, {},
///         {.linear = xsoftmax::tables::linear(weight)});
torch::Tensor mapped(const std::string& path, int64_t num_rows,
                     std::optional<int64_t> width = std::nullopt,
                     const MappedOptions& options = {});

/// Returns the parameter stored in an existing file.
///
/// - writable: false maps a private copy, which many processes can do at the same time.
/// - recover: also opens a file whose process died while writing to it. The next flush makes the
///   file consistent again.
torch::Tensor open(const std::string& path, bool writable = true, bool recover = false);

/// Returns a Linear layer that shares the memory of a table [N, D], and of a bias [N] if there is
/// one. Use it as `linear` in the options of a loss.
torch::nn::Linear linear(const torch::Tensor& weight, const torch::Tensor& bias = {});

struct PinnedOptions {
  torch::Dtype dtype = torch::kFloat32;
  torch::Device device = torch::kCUDA; ///< the GPU that computes with the table
  /// Fills the table in place, on the GPU, like the functions of torch::nn::init. Null: zeros.
  std::function<void(torch::Tensor)> init = as_linear;
};

/// Returns a CUDA parameter [num_rows, width], or [num_rows] without a width, in page-locked memory
/// of the host, for a table larger than the GPU's memory. See xsoftmax.tables.pinned in Python.
torch::Tensor pinned(int64_t num_rows, std::optional<int64_t> width = std::nullopt,
                     const PinnedOptions& options = {});

/// Applies the pending updates of row optimizers to the table, and waits until the table and the
/// optimizer state are on disk. Until the next step, the files are marked as complete.
void flush(const torch::Tensor& table);

/// Starts to read rows without waiting: from the disk, with their optimizer state, for the next
/// step while the current one computes; or from memory into the cache, just before an embedding
/// looks them up.
void prefetch(const torch::Tensor& table, const torch::Tensor& rows);

} // namespace xsoftmax::tables

// Maps raw ids to rows of a table, for ids that come and go.

namespace xsoftmax::nn {

/// Maps raw ids, any int64, to rows [0, capacity) of a class table or an embedding. Row 0 is shared
/// by all ids that have no row. In train(), each call counts its ids and assigns rows to new ones;
/// in eval(), it only looks them up. Its tensors stay on the CPU. Threads may share it. See
/// xsoftmax.IdTable in Python, which has the same state names and invariants.
///
///     xsoftmax::nn::IdTable ids(1'000'000);
///     xsoftmax::nn::SampledSoftmaxLoss loss(64, 1'000'000, sampler);
///     ids->attach(loss->linear);
///     loss(hidden, ids(raw_target)).backward();
class IdTableImpl : public torch::nn::Module {
 public:
  explicit IdTableImpl(int64_t capacity, const IdTableOptions& options = {});

  /// Returns the rows of ids [*].
  torch::Tensor forward(const torch::Tensor& ids);
  /// Counts a batch. Returns its rows [*] and the rows [E] that were reassigned from one id to
  /// another, after resetting them in everything that is attached. If a reset throws, the ids
  /// already have their rows, and the next call resets and returns the remaining rows too.
  std::tuple<torch::Tensor, torch::Tensor> insert(const torch::Tensor& ids);
  torch::Tensor find(const torch::Tensor& ids) const;
  /// Removes ids from the table. Returns the rows that they had, 0 for an id without a row.
  torch::Tensor remove(const torch::Tensor& ids);
  /// Returns the raw ids of rows, `missing` for a row without an id.
  torch::Tensor ids_of(const torch::Tensor& rows, int64_t missing = -1) const;
  /// Returns the number of ids that have a row.
  int64_t size() const;
  int64_t capacity() const { return row_ids.size(0); }

  /// Attaches a parameter [capacity, ...], so that a row and its row optimizer state are reset when
  /// the row is reassigned. `init` fills a tensor [E, ...] like the functions of torch::nn::init;
  /// it is tried here on one row. Linear layers (for example of a loss) and Embeddings are reset to
  /// their default initialisation.
  void attach(const torch::Tensor& table, std::function<void(torch::Tensor)> init);
  void attach(const torch::nn::Linear& linear);
  void attach(const torch::nn::Embedding& embedding);
  /// Attaches counts of dense ids, so that the counts of reassigned rows are forgotten.
  void attach(samplers::StreamingCounts counts);

  /// Loads the table. Throws for a state that no table with this capacity and these options can
  /// reach; the table is then unchanged.
  void load(torch::serialize::InputArchive& archive) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor slots, row_ids, seen, victims, counters;

 private:
  std::vector<torch::Tensor> state() const { return {slots, row_ids, seen, victims, counters}; }

  std::string options_;
  std::recursive_mutex mutex_; ///< held for a batch and its resets
  /// called with the reassigned rows
  std::vector<std::function<void(const torch::Tensor&)>> attached_;
  /// reassigned rows whose reset failed with an error
  torch::Tensor pending_ = torch::empty({0}, torch::kLong);
};
class IdTable : public Holder<IdTableImpl> {
 public:
  using Holder::Holder;
  explicit IdTable(int64_t capacity, const IdTableOptions& options = {})
      : Holder(std::make_shared<Impl>(capacity, options)) {}
  explicit IdTable(...) = delete; // expected: capacity[, IdTableOptions]
};

} // namespace xsoftmax::nn
