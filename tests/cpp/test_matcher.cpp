// Hierarchical linear models without Python: building, saving, loading, prediction; files of
// examples.

#include <xsoftmax/xsoftmax.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace {

namespace fs = std::filesystem;
using torch::Tensor;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "xsoftmax.XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

Tensor longs(const std::vector<int64_t>& values) { return torch::tensor(values, torch::kLong); }

// Two nodes with two labels each. Feature 0 indicates the first node, feature 1 the second node,
// feature 2 the second label of each node.
c10::intrusive_ptr<xsoftmax::XRLinear> make(torch::Dtype dtype = torch::kFloat) {
  const auto ints = [](const std::vector<int32_t>& values) {
    return torch::tensor(values, torch::kInt);
  };
  const auto bytes = [](const std::vector<int64_t>& values) {
    return torch::tensor(values, torch::kLong).to(torch::kByte);
  };
  const auto values = [&](const std::vector<float>& some) { return torch::tensor(some).to(dtype); };
  const std::vector<Tensor> top{longs({0, 2}), longs({0, 2}), ints({0, 1}),
                                bytes({0, 0}), bytes({0, 1}), values({1.0f, 1.0f})};
  const std::vector<Tensor> low{longs({0, 2, 4}),    longs({0, 2, 4}),
                                ints({2, 3, 2, 3}),  bytes({0, 0, 0, 0}),
                                bytes({1, 0, 1, 0}), values({1.0f, 0.5f, 1.0f, 0.5f})};
  return c10::make_intrusive<xsoftmax::XRLinear>(3, 1.0, "l1-hinge", longs({2, 0, 3, 1}),
                                                 std::vector<std::vector<Tensor>>{top, low});
}

struct Query { Tensor offsets, columns, values; };

Query query() {
  return {longs({0, 2}), torch::tensor({1, 2}, torch::kInt), torch::tensor({1.0f, 1.0f})};
}

TEST(XRLinear, FindsTheBestLabels) {
  const auto model = make();
  const auto [offsets, columns, values] = query();
  const auto [ends, labels, scores] =
      model->predict(offsets, columns, values, xsoftmax::XRLinearPredictOptions().topk(4).beam(2));
  EXPECT_TRUE(ends.equal(longs({0, 4})));
  // Nodes: e^-1 and 1. Labels of a node: bias 0.5 against feature 2.
  const float half = std::exp(-0.5f), one = std::exp(-1.0f);
  EXPECT_TRUE(torch::allclose(scores, torch::tensor({1.0f, half, one, one * half})));
  EXPECT_TRUE(labels.equal(longs({1, 3, 0, 2})));
  const auto alone =
      model->predict(offsets, columns, values, xsoftmax::XRLinearPredictOptions().topk(4).beam(1));
  EXPECT_TRUE(std::get<1>(alone).equal(longs({1, 3})));
}

TEST(XRLinear, GivesTheBestAsTensors) {
  const auto model = make();
  const auto [offsets, columns, values] = query();
  const auto options = xsoftmax::XRLinearPredictOptions().topk(3).beam(1); // finds only two labels
  const auto [scores, labels] = model->topk(offsets, columns, values, options);
  EXPECT_TRUE(labels.equal(longs({1, 3, -1}).unsqueeze(0)));
  EXPECT_TRUE(torch::allclose(scores, torch::tensor({{1.0f, std::exp(-0.5f), 0.0f}})));
  const auto others = std::get<1>(model->topk(offsets, columns, values,
                                              xsoftmax::XRLinearPredictOptions().topk(2).beam(2),
                                              longs({1, -1}).unsqueeze(0)));
  EXPECT_TRUE(others.equal(longs({3, 0}).unsqueeze(0)));
  const auto dense =
      xsoftmax::XRLinearPredictOptions(options).dense(torch::tensor({{0.0f, 1.0f, 1.0f}}));
  const auto nothing = torch::zeros({0});
  EXPECT_TRUE(std::get<1>(model->topk(longs({0, 0}), nothing.to(torch::kInt), nothing, dense))
                  .equal(labels));
  EXPECT_THROW(model->topk(offsets, columns, values, options, longs({1})), c10::ValueError);
}

TEST(XRLinear, TakesNamesPerLayerAndLabelsPerQuery) {
  const auto model = make();
  const auto [offsets, columns, values] = query();
  const auto named = [](const std::string& transform, const std::string& combiner) {
    return xsoftmax::XRLinearPredictOptions().topk(4).beam(2).transform(transform).combiner(
        combiner);
  };
  // Scores of the nodes are 0 and 1; of their labels .5 and 1.
  const float half = std::exp(-0.5f);
  const auto [ends, labels, scores] =
      model->predict(offsets, columns, values, named("identity,l1-hinge", "add,add"));
  EXPECT_TRUE(torch::allclose(scores, torch::tensor({2.0f, 1.0f + half, 1.0f, half})));
  EXPECT_TRUE(labels.equal(longs({1, 3, 0, 2})));
  const auto last =
      model->predict(offsets, columns, values, named("l1-hinge,identity", "multiply,last"));
  EXPECT_TRUE(torch::allclose(std::get<2>(last), torch::tensor({1.0f, 1.0f, 0.5f, 0.5f})));
  EXPECT_THROW(model->predict(offsets, columns, values, named("identity,identity,identity", "")),
               c10::ValueError);
  const auto shortlist = torch::sparse_csr_tensor(longs({0, 2}), longs({0, 2}), torch::ones({2}),
                                                  {1, 4}, torch::kFloat);
  const auto best = model->predict(
      offsets, columns, values, xsoftmax::XRLinearPredictOptions().topk(4).beam(1).only(shortlist));
  EXPECT_TRUE(std::get<1>(best).equal(longs({0, 2}))); // both are below the node that is not best
}

TEST(XRLinear, TrainsWithTheOptionsOfThePaper) {
  torch::manual_seed(0);
  const Tensor label = torch::randint(0, 40, {400}, torch::kLong),
               dense =
                   torch::randn({40, 24}).index_select(0, label) + 0.3 * torch::randn({400, 24});
  const xsoftmax::Examples examples{torch::arange(401) * 24,
                                    torch::arange(24, torch::kInt).repeat({400}),
                                    torch::nn::functional::normalize(dense).flatten(),
                                    torch::arange(401),
                                    label.to(torch::kInt),
                                    /*num_features=*/24,
                                    /*num_labels=*/40};
  const auto tree =
      xsoftmax::tree_from_vectors(xsoftmax::label_vectors::pifa(examples), 24,
                                  {.arity = 3, .max_leaf_size = 5, .balanced = false});
  auto options = xsoftmax::XRLinearTrainOptions().tree(tree).dtype(torch::kHalf).threshold(1e-3);
  const auto fraction_found = [&](const std::vector<std::string>& negatives) {
    const auto model = xsoftmax::XRLinear::train(examples, options.negatives(negatives));
    EXPECT_EQ(model->layer(0)[5].scalar_type(), torch::kHalf);
    const auto found = model->topk(examples.offsets, examples.features, examples.values,
                                   xsoftmax::XRLinearPredictOptions().topk(1));
    return std::get<1>(found).squeeze(1).eq(label).to(torch::kFloat).mean().item<float>();
  };
  EXPECT_GT(fraction_found({"tfn+man"}), 0.95);
  std::vector<std::string> each(tree->depth(), "tfn");
  each.back() = "man";
  EXPECT_GT(fraction_found(each), 0.95);
  EXPECT_THROW(fraction_found({"tfn", "man"}), c10::ValueError); // the tree has more layers
}

TEST(XRLinear, ComesBackFromItsFile) {
  const Folder folder;
  for (const auto dtype : {torch::kFloat, torch::kHalf}) {
    const auto model = make(dtype);
    model->save((folder / "model").string()); // the second model replaces the first
    const auto loaded = xsoftmax::XRLinear::load((folder / "model").string());
    EXPECT_EQ(loaded->transform(), "l1-hinge");
    EXPECT_EQ(loaded->notes(), "");
    loaded->save((folder / "noted").string(), "of May");
    const auto noted = xsoftmax::XRLinear::load((folder / "noted").string());
    EXPECT_EQ(noted->notes(), "of May");
    noted->save((folder / "noted").string());
    EXPECT_EQ(xsoftmax::XRLinear::load((folder / "noted").string())->notes(), "of May");
    EXPECT_EQ(loaded->features(), 3);
    EXPECT_TRUE(loaded->labels().equal(model->labels()));
    for (int64_t depth = 0; depth < model->depth(); ++depth) {
      for (size_t part = 0; part < model->layer(depth).size(); ++part) {
        EXPECT_TRUE(loaded->layer(depth)[part].equal(model->layer(depth)[part]));
      }
    }
    const auto [offsets, columns, values] = query();
    EXPECT_TRUE(std::get<2>(loaded->predict(offsets, columns, values))
                    .equal(std::get<2>(model->predict(offsets, columns, values))));
  }
  fs::resize_file(folder / "model" / "model.bin", 500);
  EXPECT_THROW(xsoftmax::XRLinear::load((folder / "model").string()), c10::ValueError);
  EXPECT_THROW(xsoftmax::XRLinear::load((folder / "none").string()), c10::Error);
}

TEST(ReadExamples, ReadsAndNamesWhatIsWrong) {
  const Folder folder;
  const fs::path path = folder / "data.txt";
  std::ofstream(path) << "2 3 4\n1,3 0:1.5 2:-1\n 1:2\n";
  const auto examples = xsoftmax::read_examples(path.string());
  EXPECT_TRUE(examples.offsets.equal(longs({0, 2, 3})));
  EXPECT_TRUE(examples.values.equal(torch::tensor({1.5f, -1.0f, 2.0f})));
  EXPECT_TRUE(examples.label_offsets.equal(longs({0, 2, 2})));
  EXPECT_EQ(examples.num_labels, 4);
  std::ofstream(path) << "1 3 4\n1 3:1\n";
  try {
    xsoftmax::read_examples(path.string());
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(
        std::string(error.what()).find("data.txt:2: expected features in [0, 3), got \"3:1\""),
        std::string::npos)
        << error.what();
  }
}

} // namespace
