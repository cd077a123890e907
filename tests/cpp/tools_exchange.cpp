// Trains models, makes label vectors, searches and computes ranking metrics as described by Python
// (tests/python/op/test_cpp_tools.py).
//
//     tools_exchange IN OUT
//
// IN: a dict, saved by torch.save, with "examples" (a path), "models" (dicts of options of
// XRLinear.train and "seed"), "predictions", "truth", "k", "counts", "weight", "bias", "queries",
// "exclude". OUT: a dict of tensors: "model.NUMBER.LAYER.PART", "model.NUMBER.labels", "pii.PART",
// "pifa.PART", "unit_rows.PART", the name of each metric, "found.NUMBER.FIELD".

#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <fstream>
#include <iterator>

namespace {

using torch::Tensor;
using Dict = c10::impl::GenericDict;
using Results = c10::Dict<std::string, Tensor>;
namespace metrics = xsoftmax::metrics;
namespace label_vectors = xsoftmax::label_vectors;

void put(Results& out, const std::string& name, const std::vector<Tensor>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    out.insert(name + "." + std::to_string(i), parts[i]);
  }
}

void put(Results& out, const std::string& name, const label_vectors::Rows& rows) {
  put(out, name, std::vector<Tensor>{std::get<0>(rows), std::get<1>(rows), std::get<2>(rows)});
}

xsoftmax::XRLinearTrainOptions options_of(const Dict& in) {
  xsoftmax::XRLinearTrainOptions options;
  if (in.contains("negatives")) {
    std::vector<std::string> negatives;
    for (const c10::IValue& each : in.at("negatives").toListRef()) {
      negatives.push_back(each.toStringRef());
    }
    options.negatives(negatives);
  }
  if (in.contains("loss")) {
    options.loss(in.at("loss").toStringRef());
  }
  if (in.contains("max_leaf_size")) {
    options.max_leaf_size(in.at("max_leaf_size").toInt()).arity(in.at("arity").toInt());
  }
  if (in.contains("threshold")) {
    options.threshold(in.at("threshold").toDouble())
        .bias(in.at("bias").toDouble())
        .dtype(torch::kFloat);
  }
  if (in.contains("max_weights")) {
    options.max_weights(in.at("max_weights").toInt());
  }
  if (in.contains("relevance")) {
    options.relevance(in.at("relevance").toTensor());
  }
  if (in.contains("user_offsets")) {
    options.user_negatives(
        std::make_tuple(in.at("user_offsets").toTensor(), in.at("user_labels").toTensor()));
  }
  return options;
}

void train(const Dict& in, const xsoftmax::Examples& examples, Results& out) {
  const c10::IValue models = in.at("models");
  for (size_t i = 0; i < models.toListRef().size(); ++i) {
    const Dict task = models.toListRef()[i].toGenericDict();
    const auto model = xsoftmax::XRLinear::train(
        examples, options_of(task),
        at::make_generator<at::CPUGeneratorImpl>(task.at("seed").toInt()));
    const std::string name = "model." + std::to_string(i) + ".";
    out.insert(name + "labels", model->labels());
    for (int64_t depth = 0; depth < model->depth(); ++depth) {
      put(out, name + std::to_string(depth), model->layer(depth));
    }
  }
}

void measure(const Dict& in, Results& out) {
  const Tensor predictions = in.at("predictions").toTensor(), truth = in.at("truth").toTensor();
  const int64_t k = in.at("k").toInt();
  const Tensor propensity = metrics::propensity(in.at("counts").toTensor(), 1000);
  const auto figure = [&](const char* name, double value) {
    out.insert(name, torch::tensor(value, torch::kDouble));
  };
  figure("precision_at_k", metrics::precision_at_k(predictions, truth, k));
  figure("recall_at_k", metrics::recall_at_k(predictions, truth, k));
  figure("ndcg_at_k", metrics::ndcg_at_k(predictions, truth, k));
  figure("psp_at_k", metrics::psp_at_k(predictions, truth, k, propensity));
  figure("coverage", metrics::coverage(predictions, truth.select(1, 0)));
  out.insert("propensity", propensity);
}

void search(const Dict& in, Results& out) {
  const Tensor queries = in.at("queries").toTensor();
  xsoftmax::SearchIndex index(in.at("weight").toTensor(), in.at("bias").toTensor());
  const auto save = [&](const char* name, const xsoftmax::SearchResult& found) {
    put(out, name, std::vector<Tensor>{found.scores, found.ids, found.cells_read, found.certified});
  };
  save("found.certified", index.search(queries, 5));
  save("found.cells", index.search(queries, 5, {.max_cells = 2}));
  save("found.excluded", index.search(queries, 5, {}, in.at("exclude").toTensor()));
  index.calibrate(queries);
  save("found.recall", index.search(queries, 5, {.recall = 0.8}));
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 3, "usage: tools_exchange IN OUT");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  const Dict in = torch::pickle_load(bytes).toGenericDict();
  Results out;
  const xsoftmax::Examples examples = xsoftmax::read_examples(in.at("examples").toStringRef());
  train(in, examples, out);
  put(out, "pii", label_vectors::pii(examples));
  put(out, "pifa", label_vectors::pifa(examples));
  put(out, "unit_rows",
      label_vectors::unit_rows({examples.offsets, examples.features, examples.values},
                               examples.num_features));
  measure(in, out);
  search(in, out);
  const std::vector<char> saved = torch::pickle_save(out);
  std::ofstream(argv[2], std::ios::binary).write(saved.data(), std::streamsize(saved.size()));
}
