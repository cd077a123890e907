#include "xsoftmax/matcher.h"

#include "core/checks.h"
#include "core/optional.h"
#include "matcher/linear_beam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kName = "XRLinear";
constexpr int64_t kBlock = 128; // queries that are looked up together

void check_numbers(const char* name, const Tensor& tensor, at::ScalarType dtype) {
  check::dim(kName, name, tensor, 1);
  check::dtype(kName, name, tensor, dtype);
  TORCH_CHECK_TYPE(tensor.is_cpu(), kName, ": expected ", name, " on the CPU, got ", tensor.device());
}

template <typename T>
std::span<const T> span(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), size_t(tensor.numel())};
}

template <typename T>
void check_children(const BeamLayer::Views& views, std::span<const T> child) {
  for (size_t p = 0; p + 1 < views.first_child.size(); ++p) {
    const int64_t children = views.first_child[p + 1] - views.first_child[p];
    for (int64_t e = views.entry[views.chunk[p]]; e < views.entry[views.chunk[p + 1]]; ++e) {
      TORCH_CHECK_INDEX(int64_t(child[e]) >= 0 && int64_t(child[e]) < children, kName, ": expected child in [0, ", children, "), got ",
                        int64_t(child[e]), " at [", e, "]");
    }
  }
}

/// A layer below `parents` nodes, checked.
BeamLayer::Views layer_views(int64_t parents, int64_t features, const Tensor& first_child, const Tensor& chunk, const Tensor& feature,
                             const Tensor& entry, const Tensor& child, const Tensor& value) {
  check_numbers("first_child", first_child, at::kLong);
  check_numbers("chunk", chunk, at::kLong);
  check_numbers("feature", feature, at::kInt);
  check_numbers("entry", entry, at::kLong);
  check_numbers("child", child, child.scalar_type() == at::kInt ? at::kInt : at::kByte);
  check_numbers("value", value, at::kFloat);
  check::size(kName, "first_child", first_child, 0, parents + 1, "the nodes of the layer above, and one");
  check::size(kName, "chunk", chunk, 0, parents + 1, "the nodes of the layer above, and one");
  check::size(kName, "entry", entry, 0, feature.size(0) + 1, "the features, and one");
  check::size(kName, "child", child, 0, value.size(0), "the size of value");
  check::offsets(kName, "first_child", first_child, first_child[parents].item<int64_t>());
  check::offsets(kName, "chunk", chunk, feature.size(0));
  check::offsets(kName, "entry", entry, value.size(0));
  const bool wide = child.scalar_type() == at::kInt;
  const BeamLayer::Views views{span<int64_t>(first_child), span<int64_t>(chunk), span<int64_t>(entry), span<int32_t>(feature),
                               wide ? std::span<const uint8_t>() : span<uint8_t>(child), wide ? span<int32_t>(child) : std::span<const int32_t>(),
                               span<float>(value)};
  for (int64_t p = 0; p < parents; ++p) {
    int64_t before = -1;
    for (int64_t row = views.chunk[p]; row < views.chunk[p + 1]; ++row) {
      TORCH_CHECK_VALUE(views.feature[row] > before && views.feature[row] <= features, kName,
                        ": expected feature to rise in a chunk and to be at most ", features, ", got ", views.feature[row], " after ", before,
                        " at [", row, "]");
      before = views.feature[row];
    }
  }
  wide ? check_children(views, views.wide_child) : check_children(views, views.child);
  for (size_t e = 0; e < views.value.size(); ++e) {
    TORCH_CHECK_VALUE(std::isfinite(views.value[e]), kName, ": expected value with finite numbers, got ", views.value[e], " at [", e, "]");
  }
  return views;
}

struct Transform {
  ScoreTransform transform;
  int power;
};

Transform transform_named(const std::string& name) {
  const bool log = name.rfind("log-", 0) == 0;
  const std::string rest = log ? name.substr(4) : name;
  if (rest == "sigmoid") {
    return {log ? ScoreTransform::LogSigmoid : ScoreTransform::Sigmoid, 1};
  }
  if (rest.size() == 8 && rest[0] == 'l' && rest[1] >= '1' && rest[1] <= '6' && rest.substr(2) == "-hinge") {
    return {log ? ScoreTransform::LogHinge : ScoreTransform::Hinge, rest[1] - '0'};
  }
  TORCH_CHECK_VALUE(name == "identity", kName,
                    ": expected transform as \"l1-hinge\" .. \"l6-hinge\", \"sigmoid\", \"log-l1-hinge\" .. \"log-l6-hinge\", \"log-sigmoid\" or "
                    "\"identity\", got \"", name, "\"");
  return {ScoreTransform::Identity, 1};
}

ScoreCombiner combiner_named(const std::string& name) {
  if (name == "multiply") {
    return ScoreCombiner::Multiply;
  }
  if (name == "add") {
    return ScoreCombiner::Add;
  }
  TORCH_CHECK_VALUE(name == "last", kName, ": expected combiner as \"multiply\", \"add\" or \"last\", got \"", name, "\"");
  return ScoreCombiner::Last;
}

/// Queries as the search takes them, and the tensors that hold them.
struct QueryTensors {
  Tensor offset, feature, value, dense;
  Queries views;
};

QueryTensors check_queries(const Tensor& offsets, const Tensor& columns, const Tensor& values, const OptionalTensor& dense, int64_t dense_begin,
                      int64_t features) {
  check_numbers("offsets", offsets, at::kLong);
  check_numbers("columns", columns, columns.scalar_type() == at::kLong ? at::kLong : at::kInt);
  check_numbers("values", values, at::kFloat);
  check::size(kName, "values", values, 0, columns.size(0), "the size of columns");
  TORCH_CHECK_VALUE(offsets.size(0) >= 1, kName, ": expected offsets with a number for each query and one, got none");
  QueryTensors queries{offsets.contiguous(), columns.to(at::kInt).contiguous(), values.contiguous(), {}, {}};
  check::offsets(kName, "offsets", queries.offset, columns.size(0));
  const int64_t most = given(dense) ? dense_begin : features;
  if (given(dense)) {
    check::dim(kName, "dense", *dense, 2);
    check::dtype(kName, "dense", *dense, at::kFloat);
    check::size(kName, "dense", *dense, 0, offsets.size(0) - 1, "the queries");
    TORCH_CHECK_VALUE(dense_begin >= 0 && dense_begin + dense->size(1) == features, kName,
                      ": expected dense_begin and the width of dense to add up to ", features, ", got ", dense_begin, " and ", dense->size(1));
    queries.dense = dense->contiguous();
  }
  const auto feature = span<int32_t>(queries.feature);
  const auto value = span<float>(queries.value);
  for (size_t t = 0; t < feature.size(); ++t) {
    TORCH_CHECK_INDEX(feature[t] >= 0 && feature[t] < most, kName, ": expected columns in [0, ", most, "), got ", feature[t], " at [", t, "]");
    TORCH_CHECK_VALUE(std::isfinite(value[t]), kName, ": expected values with finite numbers, got ", value[t], " at [", t, "]");
  }
  queries.views = {offsets.size(0) - 1, queries.offset.const_data_ptr<int64_t>(), feature.data(), value.data(),
                   given(dense) ? queries.dense.const_data_ptr<float>() : nullptr, int32_t(dense_begin), features - dense_begin};
  return queries;
}

BeamWorkspace& own_workspace() {
  static thread_local BeamWorkspace workspace;
  return workspace;
}

} // namespace

XRLinear::XRLinear(int64_t features, double bias, Tensor labels, std::vector<Tensor> first_child, std::vector<Tensor> chunk,
                   std::vector<Tensor> feature, std::vector<Tensor> entry, std::vector<Tensor> child, std::vector<Tensor> value)
    : features_(features), bias_(bias), labels_(labels.contiguous()) {
  TORCH_CHECK_VALUE(features >= 0 && features < std::numeric_limits<int32_t>::max(), kName, ": expected features in [0, 2^31 - 1), got ", features);
  TORCH_CHECK_VALUE(std::isfinite(bias), kName, ": expected bias as a finite number, got ", bias);
  check_numbers("labels", labels, at::kLong);
  const size_t depth = value.size();
  TORCH_CHECK_VALUE(depth >= 1, kName, ": expected at least one layer, got none");
  for (const auto* parts : {&first_child, &chunk, &feature, &entry, &child}) {
    TORCH_CHECK_VALUE(parts->size() == depth, kName, ": expected every part of ", depth, " layers, got ", parts->size());
  }
  int64_t nodes = 1;
  layers_.reserve(depth);
  for (size_t i = 0; i < depth; ++i) {
    first_child_.push_back(first_child[i].contiguous());
    chunk_.push_back(chunk[i].contiguous());
    feature_.push_back(feature[i].contiguous());
    entry_.push_back(entry[i].contiguous());
    child_.push_back(child[i].contiguous());
    value_.push_back(value[i].contiguous());
    layers_.emplace_back(layer_views(nodes, features, first_child_[i], chunk_[i], feature_[i], entry_[i], child_[i], value_[i]), int32_t(features));
    nodes = layers_.back().children();
  }
  check::size(kName, "labels", labels_, 0, nodes, "the nodes of the last layer");
}

XRLinear::~XRLinear() = default;

XRLinear::Predictions XRLinear::predict(const Tensor& offsets, const Tensor& columns, const Tensor& values, const OptionalTensor& dense,
                                        int64_t dense_begin, int64_t topk, int64_t beam, const std::string& transform, const std::string& combiner,
                                        const OptionalTensor& only) const {
  TORCH_CHECK_VALUE(topk >= 0, kName, ": expected topk of at least 0, got ", topk);
  TORCH_CHECK_VALUE(beam >= 1, kName, ": expected beam of at least 1, got ", beam);
  const auto [kind, power] = transform_named(transform);
  const QueryTensors queries = check_queries(offsets, columns, values, dense, dense_begin, features_);
  const int64_t n = queries.views.count, k = std::min(topk, num_labels());
  const BeamOptions options{beam, k, kind, power, combiner_named(combiner)};
  const std::vector<std::vector<bool>> allowed = given(only) ? allowed_nodes(*only) : std::vector<std::vector<bool>>();

  const Tensor leaf = at::empty({n, k}, at::kLong), score = at::empty({n, k}, at::kFloat), ends = at::empty({n + 1}, at::kLong);
  int64_t *leaves = leaf.mutable_data_ptr<int64_t>(), *found = ends.mutable_data_ptr<int64_t>();
  float* scores = score.mutable_data_ptr<float>();
  const auto search = [&](int64_t begin, int64_t end) {
    own_workspace().search(layers_, queries.views.part(begin, end), float(bias_), options, allowed, leaves + begin * k, scores + begin * k,
                           found + 1 + begin);
  };
  if (n <= 1) { // no thread is worth waking
    search(0, n);
  } else {
    const int64_t block = std::min(kBlock, std::max<int64_t>(1, n / (4 * at::get_num_threads())));
    at::parallel_for(0, (n + block - 1) / block, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        search(b * block, std::min((b + 1) * block, n));
      }
    });
  }
  // Closed up, and in the names of the labels.
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

std::vector<std::vector<bool>> XRLinear::allowed_nodes(const Tensor& only) const {
  check_numbers("only", only, at::kLong);
  const Tensor wanted = only.contiguous();
  check::class_ids(kName, "only", wanted, num_labels());
  std::vector<bool> named(num_labels(), false);
  for (const int64_t label : span<int64_t>(wanted)) {
    named[label] = true;
  }
  std::vector<std::vector<bool>> allowed(layers_.size());
  const auto label = span<int64_t>(labels_);
  allowed.back().resize(num_labels());
  for (int64_t i = 0; i < num_labels(); ++i) {
    allowed.back()[i] = named[label[i]];
  }
  for (size_t depth = layers_.size() - 1; depth-- > 0;) {
    const BeamLayer& below = layers_[depth + 1];
    allowed[depth].assign(below.parents(), false);
    for (int64_t p = 0; p < below.parents(); ++p) {
      for (int64_t c = below.first_child(p); c < below.first_child(p) + below.children(p) && !allowed[depth][p]; ++c) {
        allowed[depth][p] = allowed[depth + 1][c];
      }
    }
  }
  return allowed;
}

std::vector<Tensor> XRLinear::layer(int64_t depth) const {
  TORCH_CHECK_INDEX(depth >= 0 && depth < this->depth(), kName, ": expected a layer in [0, ", this->depth(), "), got ", depth);
  return {first_child_[depth], chunk_[depth], feature_[depth], entry_[depth], child_[depth], value_[depth]};
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.class_<XRLinear>("XRLinear")
      .def(torch::init<int64_t, double, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>,
                       std::vector<Tensor>, std::vector<Tensor>>())
      .def("predict", [](const c10::intrusive_ptr<XRLinear>& self, const Tensor& offsets, const Tensor& columns, const Tensor& values,
                         const OptionalTensor& dense, int64_t dense_begin, int64_t topk, int64_t beam, const std::string& transform,
                         const std::string& combiner, const OptionalTensor& only) {
        return self->predict(offsets, columns, values, dense, dense_begin, topk, beam, transform, combiner, only);
      })
      .def("layer", &XRLinear::layer)
      .def("labels", &XRLinear::labels)
      .def("features", &XRLinear::features)
      .def("bias", &XRLinear::bias)
      .def("num_labels", &XRLinear::num_labels)
      .def("depth", &XRLinear::depth)
      .def_pickle(
          [](const c10::intrusive_ptr<XRLinear>& self) {
            std::vector<std::vector<Tensor>> layers;
            for (int64_t i = 0; i < self->depth(); ++i) {
              layers.push_back(self->layer(i));
            }
            return std::make_tuple(self->features(), self->bias(), self->labels(), layers);
          },
          [](std::tuple<int64_t, double, Tensor, std::vector<std::vector<Tensor>>> state) {
            const auto& [features, bias, labels, layers] = state;
            std::vector<std::vector<Tensor>> parts(6);
            for (const auto& layer : layers) {
              TORCH_CHECK_VALUE(layer.size() == parts.size(), kName, ": expected ", parts.size(), " parts of a layer, got ", layer.size());
              for (size_t i = 0; i < parts.size(); ++i) {
                parts[i].push_back(layer[i]);
              }
            }
            return c10::make_intrusive<XRLinear>(features, bias, labels, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]);
          });
}

} // namespace xsoftmax
