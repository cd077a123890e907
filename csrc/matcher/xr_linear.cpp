#include "op/operators.h"
#include "xsoftmax/matcher.h"

#include "op/checks.h"
#include "op/long_work.h"
#include "op/optional.h"
#include "op/shape_checks.h"
#include "table/sparse_rows.h"
#include "matcher/canonical_rows.h"
#include "matcher/linear_layer.h"
#include "table/transform_names.h"
#include "op/find_op.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_csr_tensor_unsafe.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kXrLinear = "XRLinear";
constexpr int64_t kMaxNodes = int64_t(1) << 48;
constexpr int64_t kBlock = 128; // queries that are searched together

ScoreCombiner combiner_named(std::string_view name, std::string_view transform) {
  // Scores that may be negative cannot be multiplied.
  if (name.empty()) {
    return transform.starts_with("log-") || transform == "identity" ? ScoreCombiner::Add
                                                                    : ScoreCombiner::Multiply;
  }
  if (name == "multiply") {
    return ScoreCombiner::Multiply;
  }
  if (name == "add") {
    return ScoreCombiner::Add;
  }
  TORCH_CHECK_VALUE(name == "last", kXrLinear,
                    ": expected combiner as \"multiply\", \"add\" or \"last\", got \"", name, "\"");
  return ScoreCombiner::Last;
}

/// Iterates over the names of layers: a list separated by commas, or one name for all. Does not
/// allocate, since it runs for each query.
class LayerNames {
 public:
  LayerNames(const char* option, std::string_view text, size_t layers)
      : rest_(text), is_single_(text.find(',') == std::string_view::npos) {
    const auto names = 1 + size_t(std::count(text.begin(), text.end(), ','));
    TORCH_CHECK_VALUE(is_single_ || names == layers, kXrLinear, ": expected ", option,
                      " as one name, or one for each of ", layers, " layers, got ", names);
  }

  std::string_view next() {
    const std::string_view name = rest_.substr(0, rest_.find(','));
    if (!is_single_) {
      rest_.remove_prefix(std::min(rest_.size(), name.size() + 1));
    }
    return name;
  }

 private:
  std::string_view rest_;
  bool is_single_;
};

/// Returns scores that have the same order but do not underflow: logs, if values are above 0.
std::optional<LayerScoring> with_log_scores(LayerScoring scoring) {
  if (scoring.transform != ScoreTransform::Hinge && scoring.transform != ScoreTransform::Sigmoid) {
    return {};
  }
  scoring.transform = scoring.transform == ScoreTransform::Hinge ? ScoreTransform::LogHinge
                                                                 : ScoreTransform::LogSigmoid;
  if (scoring.combiner == ScoreCombiner::Multiply) {
    scoring.combiner = ScoreCombiner::Add;
  } else if (scoring.combiner == ScoreCombiner::Add) {
    scoring.combiner = ScoreCombiner::LogAdd;
  }
  return scoring;
}

/// Parses the transforms and combiners of all layers.
LinearBeamOptions beam_options(const XRLinearPredictOptions& options,
                               const std::string& model_transform, size_t layers, int64_t topk,
                               int64_t beam) {
  LayerNames transforms(
      "transform", options.transform().empty() ? model_transform : options.transform(), layers),
      combiners("combiner", options.combiner(), layers);
  LinearBeamOptions result{beam, topk, {}, /*logs=*/true};
  for (size_t depth = 0; depth < layers; ++depth) {
    const std::string_view transform = transforms.next();
    const auto [kind, power] = transform_named(kXrLinear, transform);
    result.scoring.push_back({kind, power, combiner_named(combiners.next(), transform)});
    result.logs = result.logs && with_log_scores(result.scoring.back()).has_value();
  }
  if (result.logs) {
    for (LayerScoring& scoring : result.scoring) {
      scoring = *with_log_scores(scoring);
    }
  }
  return result;
}

/// Queries as the search takes them, and the tensors that own them.
struct QueryTensors {
  Tensor offset, feature, value, dense;
  Queries views;
};

QueryTensors check_queries(const Tensor& offsets, const Tensor& columns, const Tensor& values,
                           const OptionalTensor& dense, int64_t dense_begin, int64_t features) {
  check::numbers(kXrLinear, "offsets", offsets,
                 offsets.scalar_type() == at::kInt ? at::kInt : at::kLong);
  check::numbers(kXrLinear, "columns", columns,
                 columns.scalar_type() == at::kLong ? at::kLong : at::kInt);
  check::numbers(kXrLinear, "values", values, at::kFloat);
  TORCH_CHECK_VALUE(offsets.size(0) >= 1, kXrLinear,
                    ": expected offsets with a number for each query and one, got none");
  QueryTensors queries{check::readable(offsets.to(at::kLong)),
                       check::readable(columns),
                       check::readable(values),
                       {},
                       {}};
  if (is_defined(dense)) {
    check::dim(kXrLinear, "dense", *dense, 2);
    check::dtype(kXrLinear, "dense", *dense, at::kFloat);
    TORCH_CHECK_TYPE(dense->is_cpu(), kXrLinear, ": expected dense on the CPU, got ",
                     dense->device());
    check::size(kXrLinear, "dense", *dense, 0, offsets.size(0) - 1, "the queries");
    TORCH_CHECK_VALUE(dense_begin >= 0 && dense_begin + dense->size(1) == features, kXrLinear,
                      ": expected dense_begin and the width of dense to add up to ", features,
                      ", got ", dense_begin, " and ", dense->size(1));
    queries.dense = check::readable(*dense);
    for (const float value : span_of<float>(queries.dense)) {
      TORCH_CHECK_VALUE(std::isfinite(value), kXrLinear,
                        ": expected dense with finite numbers, got ", value);
    }
  }
  const int64_t columns_end = is_defined(dense) ? dense_begin : features;
  if (const auto rows = canonical_rows(kXrLinear, queries.offset, queries.feature, queries.value,
                                       columns_end, RowKind::Weights)) {
    std::tie(queries.offset, queries.feature, queries.value) =
        std::tie(rows->offsets, rows->columns, rows->values);
  }
  // canonical_rows has checked that all are below `features`.
  if (queries.feature.scalar_type() == at::kLong) {
    queries.feature = queries.feature.to(at::kInt);
  }
  const auto feature = span_of<int32_t>(queries.feature);
  const auto value = span_of<float>(queries.value);
  queries.views = {offsets.size(0) - 1,
                   queries.offset.const_data_ptr<int64_t>(),
                   feature.data(),
                   value.data(),
                   is_defined(dense) ? queries.dense.const_data_ptr<float>() : nullptr,
                   int32_t(dense_begin),
                   features - dense_begin};
  return queries;
}

BeamWorkspace& thread_workspace() {
  static thread_local BeamWorkspace workspace;
  return workspace;
}

} // namespace

XRLinear::XRLinear(int64_t features, double bias, const std::string& transform, Tensor labels,
                   std::vector<std::vector<Tensor>> layers)
    : features_(features), bias_(bias), transform_(transform), parts_(std::move(layers)) {
  TORCH_CHECK_VALUE(features >= 0 && features < std::numeric_limits<int32_t>::max(), kXrLinear,
                    ": expected features in [0, 2^31 - 1), got ", features);
  TORCH_CHECK_VALUE(std::isfinite(bias), kXrLinear, ": expected bias as a finite number, got ",
                    bias);
  transform_named(kXrLinear, transform);
  check::numbers(kXrLinear, "labels", labels, at::kLong);
  labels_ = check::readable(labels);
  TORCH_CHECK_VALUE(!parts_.empty(), kXrLinear, ": expected at least one layer, got none");
  int64_t nodes = 1;
  layers_.reserve(parts_.size());
  for (auto& parts : parts_) {
    TORCH_CHECK_VALUE(parts.size() == kLinearLayerParts, kXrLinear, ": expected ",
                      kLinearLayerParts, " parts of a layer, got ", parts.size());
    for (Tensor& part : parts) {
      part = check::readable(part);
    }
    layers_.emplace_back(linear_layer_view(kXrLinear, nodes, features, parts), int32_t(features));
    nodes = layers_.back().children();
    TORCH_CHECK_VALUE(nodes < kMaxNodes, kXrLinear,
                      ": expected first_child of fewer than 2^48 nodes, got ", nodes);
  }
  check::size(kXrLinear, "labels", labels_, 0, nodes, "the nodes of the last layer");
  check::class_ids(kXrLinear, "labels", labels_, nodes);
  leaf_.assign(nodes, -1);
  const auto label = span_of<int64_t>(labels_);
  for (int64_t i = 0; i < nodes; ++i) {
    TORCH_CHECK_VALUE(leaf_[label[i]] < 0, kXrLinear, ": expected different labels, got ", label[i],
                      " twice");
    leaf_[label[i]] = i;
  }
}

XRLinear::~XRLinear() = default;

XRLinear::Predictions XRLinear::predict(const Tensor& offsets, const Tensor& columns,
                                        const Tensor& values,
                                        const XRLinearPredictOptions& predict_options) const {
  const int64_t topk = predict_options.topk(), beam = predict_options.beam();
  TORCH_CHECK_VALUE(topk >= 0, kXrLinear, ": expected topk of at least 0, got ", topk);
  TORCH_CHECK_VALUE(beam >= 1, kXrLinear, ": expected beam of at least 1, got ", beam);
  const QueryTensors queries = check_queries(offsets, columns, values, predict_options.dense(),
                                             predict_options.dense_begin(), features_);
  const bool per_query =
      is_defined(predict_options.only()) && predict_options.only()->layout() == at::kSparseCsr;
  const int64_t n = queries.views.count, max_children = layers_.back().max_children();
  const std::vector<AllowedNodes> allowed = !is_defined(predict_options.only())
      ? std::vector<AllowedNodes>()
      : per_query ? nodes_of_queries(*predict_options.only(), n)
                  : allowed_nodes(*predict_options.only());
  // At most max_children labels are below each node of the beam.
  int64_t most = beam > num_labels() / max_children ? num_labels() : beam * max_children;
  if (per_query) {
    most = 0;
    const std::vector<int64_t>& offset = allowed.back().offset;
    for (int64_t q = 0; q < n; ++q) {
      most = std::max(most, offset[q + 1] - offset[q]);
    }
  }
  const int64_t k = std::min({topk, num_labels(), most});
  // All labels of a query are scored.
  const LinearBeamOptions options =
      beam_options(predict_options, transform_, layers_.size(), k, per_query ? num_labels() : beam);

  const Tensor leaf = at::empty({n, k}, at::kLong), score = at::empty({n, k}, at::kFloat),
               ends = at::empty({n + 1}, at::kLong);
  int64_t *leaves = leaf.mutable_data_ptr<int64_t>(), *found = ends.mutable_data_ptr<int64_t>();
  float* scores = score.mutable_data_ptr<float>();
  const auto search = [&](int64_t begin, int64_t end) {
    thread_workspace().search(layers_, queries.views.part(begin, end), float(bias_), options,
                              allowed, leaves + begin * k, scores + begin * k, found + 1 + begin);
  };
  if (n <= 1) { // one query is not worth a thread
    search(0, n);
  } else {
    LongWork work("xr_linear_predict", n);
    const int64_t block = std::min(kBlock, std::max<int64_t>(1, n / (4 * at::get_num_threads())));
    at::parallel_for(0, (n + block - 1) / block, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last && !work.stopped(); ++b) {
        search(b * block, std::min((b + 1) * block, n));
        work.add(std::min(block, n - b * block));
      }
    });
    work.check();
  }
  // Close the gaps and convert leaves to labels.
  const int64_t* label = labels_.const_data_ptr<int64_t>();
  found[0] = 0;
  int64_t to = 0;
  for (int64_t q = 0; q < n; ++q) {
    const int64_t count = found[q + 1];
    for (int64_t i = 0; i < count; ++i, ++to) {
      leaves[to] = label[leaves[q * k + i]];
      scores[to] = scores[q * k + i];
    }
    found[q + 1] = to;
  }
  return {ends, leaf.view({-1}).narrow(0, 0, to), score.view({-1}).narrow(0, 0, to)};
}

std::tuple<Tensor, Tensor> XRLinear::topk(const Tensor& offsets, const Tensor& columns,
                                          const Tensor& values,
                                          const XRLinearPredictOptions& options,
                                          const OptionalTensor& exclude) const {
  TORCH_CHECK_VALUE(options.topk() >= 0, kXrLinear, ": expected topk of at least 0, got ",
                    options.topk());
  TORCH_CHECK_VALUE(!is_defined(exclude) || exclude->dim() == 2, kXrLinear,
                    ": expected exclude of shape [n, E], got ", exclude->sizes());
  const int64_t wanted = options.topk() + (is_defined(exclude) ? exclude->size(1) : 0);
  const auto [ends, found, found_scores] =
      predict(offsets, columns, values, XRLinearPredictOptions(options).topk(wanted));
  const Tensor counts = ends.diff(), valid = at::arange(wanted, at::kLong).lt(counts.unsqueeze(1));
  const Tensor scores =
      at::zeros({counts.size(0), wanted}, at::kFloat).masked_scatter_(valid, found_scores);
  const Tensor labels =
      at::full({counts.size(0), wanted}, -1, at::kLong).masked_scatter_(valid, found);
  if (!is_defined(exclude)) {
    return {scores, labels};
  }
  using ExcludeTopk = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                 c10::SymInt, c10::SymInt);
  static const auto op = find_op<ExcludeTopk>("xsoftmax::exclude_topk");
  const auto [best, ids] = op.call(scores, labels, *exclude, num_labels(), options.topk());
  return {best.masked_fill_(ids.lt(0), 0.0), ids};
}

Tensor XRLinear::predict_csr(const Tensor& queries, const XRLinearPredictOptions& options) const {
  TORCH_CHECK_TYPE(queries.layout() == at::kSparseCsr, kXrLinear,
                   ": expected queries as a sparse CSR tensor, got layout ", queries.layout());
  TORCH_CHECK_VALUE(queries.dim() == 2, kXrLinear,
                    ": expected queries with 2 dimensions, got shape ", queries.sizes());
  check::size(kXrLinear, "queries", queries, 1, features_, "the features of the model");
  const auto [offsets, labels, scores] =
      predict(queries.crow_indices(), queries.col_indices(), queries.values(), options);
  // CSR tensors need increasing columns.
  const auto end = span_of<int64_t>(offsets);
  int64_t* label = labels.mutable_data_ptr<int64_t>();
  float* score = scores.mutable_data_ptr<float>();
  std::vector<std::pair<int64_t, float>> row;
  for (int64_t q = 0; q < queries.size(0); ++q) {
    row.clear();
    for (int64_t t = end[q]; t < end[q + 1]; ++t) {
      row.emplace_back(label[t], score[t]);
    }
    std::sort(row.begin(), row.end());
    for (int64_t t = end[q]; t < end[q + 1]; ++t) {
      std::tie(label[t], score[t]) = row[t - end[q]];
    }
  }
  return at::_sparse_csr_tensor_unsafe(offsets, labels, scores, {queries.size(0), num_labels()},
                                       scores.options().layout(at::kSparseCsr));
}

std::vector<AllowedNodes> XRLinear::allowed_nodes(const Tensor& only) const {
  check::numbers(kXrLinear, "only", only, at::kLong);
  const Tensor wanted = check::readable(only);
  check::class_ids(kXrLinear, "only", wanted, num_labels());
  std::vector<AllowedNodes> allowed(layers_.size());
  for (size_t depth = 0; depth < layers_.size(); ++depth) {
    allowed[depth].marked.assign(layers_[depth].children(), false);
  }
  for (const int64_t label : span_of<int64_t>(wanted)) {
    int64_t node = leaf_[label];
    for (size_t depth = layers_.size(); depth-- > 0 && !allowed[depth].marked[node];
         node = layers_[depth].parent(node)) {
      allowed[depth].marked[node] = true;
    }
  }
  return allowed;
}

std::vector<AllowedNodes> XRLinear::nodes_of_queries(const Tensor& only, int64_t queries) const {
  TORCH_CHECK_VALUE(only.dim() == 2 && only.size(0) == queries && only.size(1) == num_labels(),
                    kXrLinear, ": expected only of shape [", queries, ", ", num_labels(),
                    "], labels of each query, got ", only.sizes());
  check::class_ids(kXrLinear, "only", only.col_indices().to(at::kLong), num_labels());
  const Tensor ends = only.crow_indices().to(at::kLong).contiguous(),
               columns = only.col_indices().to(at::kInt).contiguous();
  check::lists(kXrLinear, "crow_indices of only", ends, "col_indices of only", columns,
               num_labels(),
               /*rising=*/false);
  const auto end = span_of<int64_t>(ends);
  const auto label = span_of<int32_t>(columns);
  std::vector<AllowedNodes> allowed(layers_.size());
  AllowedNodes& leaves = allowed.back();
  leaves.offset = {0};
  for (int64_t q = 0; q < queries; ++q) {
    const auto begin = std::ptrdiff_t(leaves.node.size());
    for (int64_t t = end[q]; t < end[q + 1]; ++t) {
      leaves.node.push_back(leaf_[label[t]]);
    }
    std::sort(leaves.node.begin() + begin, leaves.node.end());
    leaves.offset.push_back(int64_t(leaves.node.size()));
  }
  for (size_t depth = layers_.size() - 1; depth-- > 0;) {
    const AllowedNodes& below = allowed[depth + 1];
    allowed[depth].offset = {0};
    std::vector<int64_t>& nodes = allowed[depth].node;
    for (int64_t q = 0; q < queries; ++q) {
      for (int64_t t = below.offset[q]; t < below.offset[q + 1]; ++t) {
        // Nodes increase, so those of one parent follow each other.
        if (int64_t(nodes.size()) == allowed[depth].offset[q] ||
            below.node[t] >= layers_[depth + 1].first_child(nodes.back() + 1)) {
          nodes.push_back(layers_[depth + 1].parent(below.node[t]));
        }
      }
      allowed[depth].offset.push_back(int64_t(nodes.size()));
    }
  }
  return allowed;
}

std::vector<Tensor> XRLinear::layer(int64_t depth) const {
  TORCH_CHECK_INDEX(depth >= 0 && depth < this->depth(), kXrLinear, ": expected a layer in [0, ",
                    this->depth(), "), got ", depth);
  // Copies, because the model's tensors have been validated and may be read-only.
  std::vector<Tensor> parts;
  for (const Tensor& part : parts_[depth]) {
    parts.push_back(part.clone());
  }
  return parts;
}

int64_t XRLinear::num_weights() const {
  int64_t sum = 0;
  for (const auto& parts : parts_) {
    sum += parts.back().size(0);
  }
  return sum;
}

XSOFTMAX_OPERATORS(m) {
  m.class_<XRLinear>("XRLinear")
      .def(torch::init([](int64_t features, double bias, const std::string& transform,
                          const Tensor& labels, std::vector<std::vector<Tensor>> layers) {
        for (auto& parts : layers) {
          for (Tensor& part : parts) {
            check::strided(kXrLinear, "layers", part);
            part = part.clone(); // validated now, so later changes must not reach it
          }
        }
        check::strided(kXrLinear, "labels", labels);
        return c10::make_intrusive<XRLinear>(features, bias, transform, labels.clone(),
                                             std::move(layers));
      }))
      .def("predict",
           [](const c10::intrusive_ptr<XRLinear>& self, const Tensor& offsets,
              const Tensor& columns, const Tensor& values, const OptionalTensor& dense,
              int64_t dense_begin, int64_t topk, int64_t beam, const std::string& transform,
              const std::string& combiner, const OptionalTensor& only) {
             const auto options = XRLinearPredictOptions()
                                      .topk(topk)
                                      .beam(beam)
                                      .transform(transform)
                                      .combiner(combiner)
                                      .only(only);
             return self->predict(
                 offsets, columns, values,
                 XRLinearPredictOptions(options).dense(dense).dense_begin(dense_begin));
           })
      .def("predict_csr",
           [](const c10::intrusive_ptr<XRLinear>& self, const Tensor& queries, int64_t topk,
              int64_t beam) {
             return self->predict_csr(queries, XRLinearPredictOptions().topk(topk).beam(beam));
           })
      .def("layer", &XRLinear::layer)
      .def("labels", &XRLinear::labels)
      .def("num_weights", &XRLinear::num_weights)
      .def("features", &XRLinear::features)
      .def("bias", &XRLinear::bias)
      .def("num_labels", &XRLinear::num_labels)
      .def("depth", &XRLinear::depth)
      .def("transform", &XRLinear::transform)
      .def("notes", &XRLinear::notes)
      .def("save", &XRLinear::save)
      .def_pickle(
          [](const c10::intrusive_ptr<XRLinear>& self) {
            std::vector<std::vector<Tensor>> layers;
            for (int64_t i = 0; i < self->depth(); ++i) {
              layers.push_back(self->layer(i));
            }
            return std::make_tuple(
                std::make_tuple(self->features(), self->bias(), self->transform()), self->labels(),
                layers);
          },
          [](std::tuple<std::tuple<int64_t, double, std::string>, Tensor,
                        std::vector<std::vector<Tensor>>>
                 state) {
            const auto& [numbers, labels, layers] = state;
            const auto& [features, bias, transform] = numbers;
            return c10::make_intrusive<XRLinear>(features, bias, transform, labels, layers);
          });
  m.def("xr_linear_check_target(str path) -> ()", &XRLinear::check_target);
  m.def("xr_linear_load(str path) -> __torch__.torch.classes.xsoftmax.XRLinear",
        [](const std::string& path) { return XRLinear::load(path); });
}

} // namespace xsoftmax
