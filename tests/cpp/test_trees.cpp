// LabelTree and the losses over trees and of CANE, from C++: the same behaviour as the Python
// modules, state, training, errors.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace {

using torch::Tensor;
using xsoftmax::LabelTree;
using xsoftmax::nn::BeamTreeLoss;
using xsoftmax::nn::BeamTreeOptions;
using xsoftmax::nn::CaneLoss;
using xsoftmax::nn::CaneOptions;
using xsoftmax::nn::HierarchicalMatcher;
using xsoftmax::nn::HierarchicalSoftmaxLoss;
using xsoftmax::nn::LossOptions;
namespace F = torch::nn::functional;
namespace samplers = xsoftmax::samplers;

constexpr int64_t kWidth = 6, kClasses = 40;

template <typename From, typename To>
void roundtrip(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

class Trees : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  LabelTree tree = LabelTree::balanced(torch::randperm(kClasses), 3);
  Tensor input = torch::randn({7, kWidth});
  Tensor target = torch::tensor({3, 0, 39, -100, 2, 17, 17}, torch::kLong);
};

TEST_F(Trees, EveryMakerGivesAWholeTree) {
  const Tensor counts = torch::arange(1, kClasses + 1);
  const std::vector<LabelTree> trees{
      tree,
      LabelTree::random(kClasses, 4),
      LabelTree::from_vectors(torch::randn({kClasses, 5}), {.arity = 4}),
      LabelTree::from_vectors(torch::randn({kClasses, 5}), {.arity = 4, .max_leaf_size = 3}),
      LabelTree::balanced(kClasses),
      LabelTree::from_frequencies(counts, 6),
      LabelTree::huffman(counts),
      LabelTree::from_parents(
          torch::cat({torch::tensor({-1}), torch::zeros({kClasses}, torch::kLong)}))};
  for (const auto& some : trees) {
    EXPECT_EQ(some->num_classes(), kClasses);
    EXPECT_TRUE(
        torch::equal(some->node_class.index_select(0, some->class_node), torch::arange(kClasses)));
    int64_t nodes = 1;
    for (const int64_t size : some->layer_sizes) {
      nodes += size;
    }
    EXPECT_EQ(nodes, some->num_nodes());
    const Tensor path = some->path(torch::arange(kClasses));
    EXPECT_TRUE(torch::equal(std::get<0>(path.max(1)),
                             some->class_node)); // breadth-first: the leaf has the largest number
    EXPECT_TRUE(some->parent.index_select(0, path.select(1, 0)).eq(0).all().item<bool>());
  }
  EXPECT_EQ(LabelTree::from_vectors(torch::randn({kClasses, 5}), {.arity = 4, .max_leaf_size = 10})
                ->layer_sizes,
            (std::vector<int64_t>{4, kClasses}));
  EXPECT_EQ(tree->arity(), 3);
  EXPECT_THROW(LabelTree::from_vectors(torch::randn({4, 5}), {.max_leaf_size = -1}),
               c10::ValueError);
  EXPECT_THROW(LabelTree::from_parents(torch::tensor({-1, -1})), c10::ValueError);
  EXPECT_THROW(LabelTree::balanced(torch::tensor({0, 0})), c10::ValueError);
}

TEST_F(Trees, AnotherTreeIsLoaded) {
  LabelTree other = LabelTree::huffman(torch::arange(1, 9));
  roundtrip(tree, other);
  EXPECT_EQ(other->num_classes(), kClasses);
  EXPECT_EQ(other->layer_sizes, tree->layer_sizes);
  EXPECT_TRUE(torch::equal(other->named_buffers()["class_node"], tree->class_node));
}

TEST_F(Trees, HierarchicalSoftmaxIsTheNegativeLogProbability) {
  for (const std::string reduction : {"mean", "sum", "none"}) {
    const Tensor weight = torch::linspace(0.5, 2.0, kClasses);
    HierarchicalSoftmaxLoss loss(
        kWidth, tree, LossOptions{.bias = true, .weight = weight, .reduction = reduction});
    const Tensor log_prob = loss->log_prob(input);
    EXPECT_TRUE(torch::allclose(log_prob.logsumexp(1), torch::zeros({7}), 0, 1e-5));
    const auto options = F::NLLLossFuncOptions().weight(weight).reduction(
        reduction == "mean"      ? F::NLLLossFuncOptions::reduction_t(torch::kMean)
            : reduction == "sum" ? F::NLLLossFuncOptions::reduction_t(torch::kSum)
                                 : torch::kNone);
    EXPECT_TRUE(
        torch::allclose(loss->forward(input, target), F::nll_loss(log_prob, target, options)));
    const auto [values, classes] = loss->topk(input, 4);
    EXPECT_TRUE(torch::allclose(values, std::get<0>(log_prob.topk(4))));
    EXPECT_TRUE(torch::equal(classes, std::get<1>(log_prob.topk(4))));
  }
}

TEST_F(Trees, BeamTreeWithAllClassesIsExact) {
  BeamTreeLoss loss(kWidth, tree, BeamTreeOptions{.num_candidates = 100, .num_noises = 3},
                    LossOptions{.bias = true});
  const Tensor want = F::cross_entropy(loss->scores(input), target);
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), want));
  loss->eval();
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), want));
  EXPECT_TRUE(torch::equal(loss->predict(input), loss->log_prob(input).argmax(1)));
}

TEST_F(Trees, AWiderBeamFindsTheBestCandidates) {
  BeamTreeLoss loss(kWidth, tree,
                    BeamTreeOptions{.num_candidates = 4, .num_noises = 1, .beam = kClasses});
  EXPECT_TRUE(torch::equal(loss->candidates(input), std::get<1>(loss->scores(input).topk(4))));
  EXPECT_THROW(
      BeamTreeLoss(kWidth, tree, BeamTreeOptions{.num_candidates = 4, .num_noises = 1, .beam = 3}),
      c10::ValueError);
}

TEST_F(Trees, BalanceChangesNoScore) {
  BeamTreeLoss loss(kWidth, tree,
                    BeamTreeOptions{.num_candidates = 3, .num_noises = 1, .balance_every = 2},
                    LossOptions{.bias = true});
  const Tensor want = loss->scores(input).detach(), before = loss->edges->weight.detach().clone();
  loss->forward(input, target);
  EXPECT_TRUE(torch::equal(loss->edges->weight, before));
  loss->forward(input, target);
  EXPECT_FALSE(torch::equal(loss->edges->weight, before));
  EXPECT_TRUE(torch::allclose(loss->scores(input), want, 1e-5, 1e-5));
}

TEST_F(Trees, TheBeamTreeLearns) {
  for (const bool routed : {false, true}) {
    torch::manual_seed(1);
    const auto unigram = samplers::UnigramSampler(torch::arange(1, kClasses + 1), 8, 0.75,
                                                  samplers::DrawOptions{.shared = false})
                             .ptr();
    BeamTreeLoss loss(kWidth,
                      routed ? LabelTree::from_frequencies(torch::ones({kClasses}), 5) : tree,
                      BeamTreeOptions{.num_candidates = 6,
                                      .num_noises = 2,
                                      .noise_sampler = unigram,
                                      .noise_reduction = "log_of_mean",
                                      .routed = routed,
                                      .sparse_grad = true});
    const Tensor x = 2 * torch::randn({kClasses, kWidth}), y = torch::arange(kClasses);
    const double first = loss->exact(x, y).item<double>();
    xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
    for (int step = 0; step < 300; ++step) {
      optimizer.zero_grad();
      const Tensor value = loss->forward(x, y);
      value.backward();
      EXPECT_TRUE(loss->edges->weight.grad().is_sparse());
      optimizer.step();
    }
    EXPECT_LT(loss->exact(x, y).item<double>(), 0.5 * first);
    EXPECT_EQ(loss->candidates(x).size(1), 6);
    BeamTreeLoss other(kWidth,
                       routed ? LabelTree::from_frequencies(torch::ones({kClasses}), 5)
                              : LabelTree::random(kClasses, 3),
                       BeamTreeOptions{.num_candidates = 6, .num_noises = 2});
    roundtrip(loss, other);
    EXPECT_TRUE(torch::equal(other->scores(x), loss->scores(x)));
    EXPECT_EQ(other->steps.item<int64_t>(), 300);
  }
}

TEST_F(Trees, NamesOfStateAreThoseOfPython) { // same list in tests/python/trees/test_beam_tree.py
  BeamTreeLoss beam(kWidth, tree, BeamTreeOptions{.num_candidates = 2, .num_noises = 1},
                    LossOptions{.bias = true, .weight = torch::ones({kClasses})});
  std::vector<std::string> names = beam->named_parameters().keys(),
                           buffers = beam->named_buffers().keys();
  names.insert(names.end(), buffers.begin(), buffers.end());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(
      names,
      (std::vector<std::string>{"edges.bias", "edges.weight", "steps", "tree.class_node",
                                "tree.first_child", "tree.node_class", "tree.parent", "weight"}));
  HierarchicalSoftmaxLoss hierarchical(
      kWidth, tree, LossOptions{.bias = true, .weight = torch::ones({kClasses})});
  roundtrip(beam, hierarchical); // losses over the same tree share checkpoints
  EXPECT_TRUE(torch::equal(hierarchical->edges->weight, beam->edges->weight));
  hierarchical->edges->weight.detach().zero_();
  roundtrip(hierarchical, beam);
  EXPECT_TRUE(torch::equal(hierarchical->edges->weight, beam->edges->weight));
}

TEST_F(Trees, AnErrorChangesNothingAndIgnoredQueriesChangeNothingForTheOthers) {
  BeamTreeLoss loss(kWidth, tree,
                    BeamTreeOptions{.num_candidates = 3, .num_noises = 2, .balance_every = 2});
  auto generator = at::detail::createCPUGenerator(3);
  const Tensor state = generator.get_state(), before = loss->edges->weight.detach().clone();
  EXPECT_THROW(loss->forward(input, target.clone().fill_(40), generator), c10::IndexError);
  EXPECT_THROW(loss->forward(input.to(torch::kDouble), target, generator), c10::TypeError);
  EXPECT_EQ(loss->steps.item<int64_t>(), 0);
  EXPECT_TRUE(torch::equal(generator.get_state(), state));
  const Tensor value = loss->forward(input, target, generator);
  generator.set_state(state);
  input[3].fill_(NAN);
  loss->steps.zero_();
  EXPECT_TRUE(torch::equal(loss->forward(input, target, generator), value));
}

TEST_F(Trees, BalanceAppliesPendingUpdates) {
  const auto run = [&](int64_t every) {
    torch::manual_seed(3);
    BeamTreeLoss loss(kWidth, tree,
                      BeamTreeOptions{.num_candidates = 3, .num_noises = 1, .balance_every = 0});
    xsoftmax::optim::RowAdam optimizer(loss->parameters(),
                                       xsoftmax::optim::RowAdamOptions(0.01).weight_decay(0.5));
    for (int64_t step = 0; step < 20; ++step) { // gradients that do not depend on the edges
      const Tensor rows = torch::randperm(tree->num_edges()).slice(0, 0, 5).unsqueeze(0);
      loss->edges->weight.mutable_grad() =
          torch::sparse_coo_tensor(rows, torch::randn({5, kWidth}), loss->edges->weight.sizes());
      optimizer.step();
      if (every > 0 && step % every == 0) {
        loss->balance();
      }
    }
    return loss->scores(input).detach();
  };
  EXPECT_TRUE(torch::allclose(run(3), run(0), 1e-4, 1e-5));
}

TEST_F(Trees, CaneWithAllClassesIsExactAndLearnsWithFew) {
  CaneLoss all(kWidth, kClasses, CaneOptions{.candidates = torch::arange(kClasses)},
               LossOptions{.bias = true});
  EXPECT_TRUE(torch::allclose(all->forward(input, target), all->exact(input, target)));
  CaneLoss told(kWidth, kClasses, CaneOptions{});
  EXPECT_TRUE(torch::allclose(told->forward(input, target, torch::arange(kClasses)),
                              told->exact(input, target)));
  const Tensor x = 2 * torch::randn({kClasses, kWidth}), y = torch::arange(kClasses);
  const auto midx = samplers::MidxSampler(
                        kClasses, kWidth,
                        samplers::MidxOptions{.num_samples = 5, .codewords = 4, .distinct = true})
                        .ptr();
  for (const CaneOptions& options : {CaneOptions{.candidates = torch::arange(8)},
                                     CaneOptions{.candidate_sampler = midx, .num_noises = 2}}) {
    CaneLoss loss(kWidth, kClasses, options);
    const double first = loss->exact(x, y).item<double>();
    xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
    for (int step = 0; step < 200; ++step) {
      optimizer.zero_grad();
      loss->forward(x, y).backward();
      optimizer.step();
    }
    EXPECT_LT(loss->exact(x, y).item<double>(), 0.5 * first);
  }
}

TEST_F(Trees, LossesOverTreesChangeTheirDtypeAndKeepTheirTree) {
  BeamTreeLoss beam(kWidth, tree, BeamTreeOptions{.num_candidates = 3, .balance_every = 2});
  HierarchicalSoftmaxLoss hierarchical(kWidth, tree);
  const double before = beam->exact(input, target).item<double>();
  beam->to(torch::kDouble);
  hierarchical->to(torch::kDouble);
  const Tensor x = input.to(torch::kDouble);
  EXPECT_NEAR(beam->exact(x, target).item<double>(), before, 1e-5);
  for (int step = 0; step < 3; ++step) {
    beam->forward(x, target).backward();
  }
  EXPECT_EQ(beam->steps.item<int64_t>(), 3);
  EXPECT_TRUE(hierarchical->forward(x, target).isfinite().item<bool>());
  beam->to(torch::kBFloat16);
  EXPECT_EQ(beam->exact(input.to(torch::kBFloat16), target).scalar_type(), torch::kFloat);
}

TEST_F(Trees, CastsLeaveTheCountOfSteps) {
  BeamTreeLoss beam(kWidth, tree, BeamTreeOptions{.num_candidates = 3});
  beam->steps.fill_(4099); // not representable in bfloat16 or float16
  for (const auto dtype : {torch::kBFloat16, torch::kHalf, torch::kFloat}) {
    beam->to(dtype);
    beam->to(torch::kCPU, dtype);
  }
  EXPECT_EQ(beam->steps.item<int64_t>(), 4099);
}

TEST_F(Trees, ACheckpointOfATreeThatDoesNotFitChangesNothing) {
  const auto routed = [](const LabelTree& over) {
    return BeamTreeLoss(kWidth, over, BeamTreeOptions{.num_candidates = 2, .routed = true});
  };
  HierarchicalSoftmaxLoss larger(kWidth, LabelTree::balanced(kClasses + 1, 3)), loss(kWidth, tree);
  const LabelTree subsets = LabelTree::from_frequencies(torch::ones({4}), 2),
                  deep = LabelTree::from_parents(torch::tensor({-1, 0, 0, 1, 1, 3, 3}));
  const auto refused = [](auto& saved, auto& given) {
    const Tensor before = given->edges->weight.clone();
    std::stringstream stream;
    torch::save(saved, stream);
    EXPECT_THROW(torch::load(given, stream), c10::ValueError);
    EXPECT_TRUE(torch::equal(given->edges->weight, before));
  };
  refused(larger, loss);
  EXPECT_EQ(subsets->parent.size(0), deep->parent.size(0));
  HierarchicalSoftmaxLoss of_deep(kWidth, deep);
  BeamTreeLoss of_subsets = routed(subsets);
  refused(of_deep, of_subsets);
}

TEST_F(Trees, AMatcherGoesOnFromItsCheckpoint) {
  const Tensor labels =
      torch::tensor({{3, -1}, {0, 1}, {39, 38}, {-1, -1}, {2, 2}, {17, 3}, {17, -1}});
  HierarchicalMatcher matcher(kWidth, tree, {.loss = "logistic", .beam = 2}),
      other(kWidth, LabelTree::balanced(kClasses, 3), {.loss = "logistic", .beam = 2});
  EXPECT_THROW(matcher->topk(input, 3), c10::ValueError); // not all layers are trained
  {
    xsoftmax::optim::RowAdam optimizer(matcher->parameters(), xsoftmax::optim::RowAdamOptions(0.1));
    matcher(input, labels).backward();
    EXPECT_TRUE(matcher->edges->weight.grad().is_sparse());
    optimizer.step();
  }
  EXPECT_TRUE(matcher->next_layer());
  matcher->to(torch::kBFloat16); // the integer buffer `layer` is not cast
  matcher->to(torch::kFloat);
  matcher->init_from_prototypes(input, labels);
  roundtrip(matcher, other);
  EXPECT_EQ(other->layer.item<int64_t>(), 2);
  EXPECT_EQ(other->layer.scalar_type(), torch::kLong);
  while (matcher->next_layer()) {
    EXPECT_TRUE(other->next_layer());
  }
  EXPECT_FALSE(other->next_layer());
  EXPECT_TRUE(torch::equal(matcher(input, labels), other(input, labels)));
  const auto [scores, found] = matcher->topk(input, 4, kClasses, labels);
  EXPECT_TRUE(torch::equal(found, std::get<1>(other->topk(input, 4, kClasses, labels))));
  EXPECT_TRUE(torch::equal(matcher->predict(input), std::get<1>(other->topk(input, 1)).squeeze(1)));
  EXPECT_FALSE(found.unsqueeze(2).eq(labels.unsqueeze(1)).any().item<bool>());
  EXPECT_TRUE(scores.gt(0).logical_and(scores.le(1)).all().item<bool>());
}

TEST_F(Trees, AMatcherRefusesWhatDoesNotFitAndChangesNothing) {
  HierarchicalMatcher matcher(kWidth, tree), other(kWidth, tree);
  const Tensor labels = torch::zeros({7, 2}, torch::kLong),
               before = matcher->edges->weight.detach().clone();
  EXPECT_THROW(matcher(input, labels.slice(0, 1)), c10::ValueError);
  EXPECT_THROW(matcher(input, labels.to(torch::kFloat)), c10::TypeError);
  EXPECT_THROW(matcher(input, labels + kClasses), c10::IndexError);
  EXPECT_THROW(matcher(input, torch::zeros({7, kClasses}, torch::kLong)),
               c10::ValueError); // multi-hot
  EXPECT_THROW(matcher->init_from_prototypes(input.slice(0, 0, 0), labels.slice(0, 0, 0)),
               c10::ValueError);
  EXPECT_THROW(
      matcher->init_from_prototypes(input * std::numeric_limits<double>::infinity(), labels),
      c10::ValueError);
  for (const int64_t layer : {int64_t(0), tree->depth() + 1}) {
    other->layer.fill_(layer);
    std::stringstream stream;
    torch::save(other, stream);
    EXPECT_THROW(torch::load(matcher, stream), c10::ValueError);
  }
  EXPECT_EQ(matcher->layer.item<int64_t>(), 1);
  EXPECT_TRUE(torch::equal(matcher->edges->weight, before));
  matcher->layer.fill_(tree->depth());
  EXPECT_THROW(matcher->topk(input, kClasses + 1), c10::ValueError);
  EXPECT_THROW(matcher->topk(input, 3, 2), c10::ValueError);
  EXPECT_THROW(HierarchicalMatcher(kWidth, tree, {.loss = "hinge"}), c10::ValueError);
  EXPECT_THROW(HierarchicalMatcher(kWidth, tree, {.beam = 0}), c10::ValueError);
  EXPECT_THROW(HierarchicalMatcher(kWidth, tree, {.reduction = "max"}), c10::ValueError);
  EXPECT_THROW(HierarchicalMatcher(kWidth, LabelTree::balanced(1)), c10::ValueError);
}

TEST_F(Trees, BadArguments) {
  EXPECT_THROW(
      CaneLoss(kWidth, kClasses, CaneOptions{.candidates = torch::zeros({0}, torch::kLong)}),
      c10::ValueError);
  EXPECT_THROW(CaneLoss(kWidth, kClasses, CaneOptions{.candidates = torch::tensor({1, 40})}),
               c10::IndexError);
  CaneLoss told(kWidth, kClasses, CaneOptions{});
  EXPECT_THROW(told->forward(input, target), c10::ValueError);
  EXPECT_THROW(told->forward(input, target, torch::tensor({1, 40})), c10::IndexError);
  EXPECT_THROW(told->forward(input, target, torch::zeros({2, 1, 3}, torch::kLong)),
               c10::ValueError);
  BeamTreeLoss beam(kWidth, tree, BeamTreeOptions{.num_candidates = 2});
  EXPECT_THROW(beam->topk(input, -1), c10::ValueError);
  EXPECT_THROW(HierarchicalSoftmaxLoss(kWidth, tree)->topk(input, kClasses + 1), c10::ValueError);
  EXPECT_THROW(beam->forward(input, target.clone().fill_(40)), c10::IndexError);
  EXPECT_THROW(BeamTreeLoss(kWidth, tree, BeamTreeOptions{.num_candidates = 0}), c10::ValueError);
  EXPECT_THROW(
      BeamTreeLoss(kWidth, tree, BeamTreeOptions{.num_candidates = 2, .noise_reduction = "mean"}),
      c10::ValueError);
  EXPECT_THROW(BeamTreeLoss(kWidth, tree, BeamTreeOptions{.num_candidates = 2, .routed = true}),
               c10::ValueError);
  const auto midx =
      samplers::MidxSampler(kClasses, kWidth, samplers::MidxOptions{.codewords = 4}).ptr();
  EXPECT_THROW(
      BeamTreeLoss(kWidth, tree,
                   BeamTreeOptions{.num_candidates = 2, .num_noises = 1, .noise_sampler = midx}),
      c10::ValueError);
  EXPECT_THROW(HierarchicalSoftmaxLoss(kWidth, tree, LossOptions{.label_smoothing = 0.1}),
               c10::ValueError);
  EXPECT_THROW(HierarchicalSoftmaxLoss(kWidth, tree, LossOptions{.softcap = 30.0}),
               c10::ValueError);
  HierarchicalSoftmaxLoss loss(kWidth, tree);
  EXPECT_THROW(loss->forward(input, target.clone().fill_(40)), c10::IndexError);
  EXPECT_THROW(loss->forward(input, target.slice(0, 1)), c10::ValueError);
}

} // namespace
