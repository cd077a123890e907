#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/ops.h>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor plain_scores(const Tensor& input, const Tensor& weight, const Tensor& bias,
                    const Tensor& own, const Tensor& shared) {
  const Tensor own_scores = (input.unsqueeze(1) * weight.index({own})).sum(-1) + bias.index({own});
  return at::cat({own_scores, input.mm(weight.index({shared}).t()) + bias.index({shared})}, 1);
}

class CandidateScores : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  // Odd sizes, so that every vectorised loop has a tail; repeated ids, so that gradients of equal
  // rows are added up.
  Tensor input = at::randn({5, 19}, at::kDouble), weight = at::randn({11, 19}, at::kDouble),
         bias = at::randn({11}, at::kDouble);
  Tensor own = at::randint(11, {5, 3}, at::kLong), shared = at::tensor({4, 4, 10, 0}, at::kLong);
};

TEST_F(CandidateScores, AreTheDotProducts) {
  const Tensor scores = xsoftmax::candidate_scores(input, weight, bias, own, shared);
  EXPECT_TRUE(at::allclose(scores, plain_scores(input, weight, bias, own, shared)));
}

TEST_F(CandidateScores, AreReachedThroughTheDispatcherByName) {
  const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("xsoftmax::candidate_scores", "")
          .typed<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, std::optional<bool>)>();
  const Tensor scores = op.call(input, weight, bias, std::nullopt, shared, true);
  EXPECT_TRUE(at::allclose(scores, input.mm(weight.index({shared}).t()) + bias.index({shared})));
}

TEST_F(CandidateScores, GradientsAreThoseOfThePlainExpression) {
  for (const bool sparse : {true, false}) {
    std::vector<Tensor> ours, plain;
    for (std::vector<Tensor>* grads : {&ours, &plain}) {
      std::vector<Tensor> leaves{input.clone().requires_grad_(), weight.clone().requires_grad_(),
                                 bias.clone().requires_grad_()};
      const Tensor scores = grads == &ours
          ? xsoftmax::candidate_scores(leaves[0], leaves[1], leaves[2], own, shared, sparse)
          : plain_scores(leaves[0], leaves[1], leaves[2], own, shared);
      scores.sin().sum().backward();
      for (const Tensor& leaf : leaves) {
        grads->push_back(leaf.grad().is_sparse() ? leaf.grad().to_dense() : leaf.grad());
      }
      EXPECT_EQ(leaves[1].grad().is_sparse(), sparse && grads == &ours);
    }
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours[i], plain[i])) << "gradient " << i << ", sparse " << sparse;
    }
  }
}

TEST_F(CandidateScores, AnEmptyBatchHasNoScores) {
  const Tensor scores =
      xsoftmax::candidate_scores(input.slice(0, 0, 0), weight, bias, own.slice(0, 0, 0), shared);
  EXPECT_EQ(scores.sizes(), (at::IntArrayRef{0, 7}));
}

TEST_F(CandidateScores, AnIdOutOfRangeIsAnErrorThatNamesIt) {
  for (const int64_t bad : {int64_t(-1), int64_t(11)}) {
    own[3][2] = bad;
    try {
      xsoftmax::candidate_scores(input, weight, bias, own, shared);
      FAIL() << "expected an error for id " << bad;
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      EXPECT_NE(message.find("private_ids in [0, 11), got " + std::to_string(bad) + " at [3, 2]"),
                std::string::npos)
          << message;
    }
  }
}

TEST_F(CandidateScores, WrongShapesAndDtypesAreErrors) {
  EXPECT_THROW(xsoftmax::candidate_scores(input, weight, bias, std::nullopt, std::nullopt),
               c10::Error);
  EXPECT_THROW(xsoftmax::candidate_scores(input, weight.slice(1, 0, 7), bias, own, shared),
               c10::Error);
  EXPECT_THROW(xsoftmax::candidate_scores(input, weight.to(at::kFloat), bias, own, shared),
               c10::Error);
  EXPECT_THROW(xsoftmax::candidate_scores(input, weight, bias, own.to(at::kInt), shared),
               c10::Error);
  EXPECT_THROW(xsoftmax::candidate_scores(input, weight, bias, own.slice(0, 0, 4), shared),
               c10::Error);
}

} // namespace
